"""The engine's settings."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_num_batched_tokens` is the token budget of one step; `max_model_len` None means the model's own;
    `kv_cache_bytes` is the size of the paged KV cache, all layers together; None: on a GPU what `memory_fraction` of
    its memory leaves beside the weights, the largest step, and `reserved_bytes` for others; on the CPU 512 MiB.
    `largest_item_tokens`: positions that the model's largest picture takes in a prompt; the engine does not start where
    it has no room for one. Tokens that attend to each other, so many and the budget of a step, go in one step.
    `prefix_caching`: requests take up what others have left in the KV cache of the same beginning.

    `quantization`: 8-bit weights of the decoder's layers. `kv_cache_dtype` None is `dtype`; a smaller one holds more
    positions in the same bytes, less exactly."""

    model: str
    revision: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.9
    reserved_bytes: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    largest_item_tokens: int = 0
    prefix_caching: bool = True
    quantization: Literal["int8"] | None = None
    kv_cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if self.quantization not in (None, "int8"):
            raise ValueError(f"quantization must be 'int8' or None, got {self.quantization!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running sequence decodes one token a step; a smaller budget would starve the last of them.
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs})"
            )
