"""Measures the GPU memory left for the KV cache, by running the largest possible step before the cache is allocated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from raylens.llm.config import EngineConfig
from raylens.llm.step_input import StepInput

_REMEDY = "lower max_num_batched_tokens or max_num_seqs"


def worst_step(
    *,
    num_tokens: int,
    num_positions: int,
    num_logits: int,
    num_rope_axes: int,
    block_size: int,
    is_span: bool,
    embedding_size: int | None = None,
) -> StepInput:
    """Returns a step that computes the last `num_tokens` tokens of a prompt of `num_positions`.

    `num_logits`: rows of logits, one for each sequence that can run at once. `is_span`: the tokens attend to each
    other. `embedding_size`: all tokens belong to items with embeddings of this size; None: to text. The step reads and
    writes block 0 only, so that a cache of one block is enough.
    """
    num_tokens = min(num_tokens, num_positions)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return StepInput(
        token_ids=zeros,
        positions=torch.arange(num_positions - num_tokens, num_positions).expand(num_rope_axes, -1),
        slot_mapping=zeros,
        logits_rows=torch.zeros(num_logits, dtype=torch.int64),
        embed_rows=zeros[:0] if embedding_size is None else torch.arange(num_tokens),
        embeds=[] if embedding_size is None else [torch.zeros(num_tokens, embedding_size)],
        block_tables=[[0] * -(-num_positions // block_size)],
        query_lengths=[num_tokens],
        context_lengths=[num_positions],
        prompt_lengths=[num_positions],
        span_members=[(0, 0, at) for at in range(num_positions - num_tokens, num_positions)] if is_span else [],
        scored=[],
    )


@contextmanager
def shortage_explained(device: torch.device, config: EngineConfig, num_tokens: int) -> Iterator[None]:
    """Wraps the largest step, of `num_tokens`. Turns PyTorch's out-of-memory error into a ValueError that names the
    settings and the bytes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = _Memory.of(device)
        raise ValueError(
            f"the GPU's memory ({memory.total} bytes) does not hold the largest step,"
            f" {_named_step(config, num_tokens)}:"
            f" it needs more than the {memory.total - memory.elsewhere} bytes that others leave; {_REMEDY}"
        ) from error


def bytes_left_for_cache(
    run_worst_step: Callable[[], None],
    device: torch.device,
    config: EngineConfig,
    *,
    num_tokens: int,
    bytes_of_block: int,
) -> int:
    """Returns the bytes that the KV cache may take.

    The engine may use `memory_fraction` of its share of the GPU's memory, and no more than other processes leave of
    `memory_fraction` of the whole memory. The peak of weights and step, and `reserved_bytes` for the other work of this
    process, are subtracted.

    `num_tokens`: of the step. Raises ValueError when less than a block of the cache is left.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    memory = _Memory.of(device)
    allowed = int(memory.total * config.memory_fraction)
    share = min(int(allowed * config.gpu_share), allowed - memory.elsewhere)
    left = share - peak - config.reserved_bytes
    if left < bytes_of_block:
        own = "" if config.gpu_share == 1 else f" times this engine's share of the GPU ({config.gpu_share})"
        raise ValueError(
            f"memory_fraction ({config.memory_fraction}) of {memory.total} bytes{own} has no room for the KV cache:"
            f" a block takes {bytes_of_block} bytes, and {left} are left. Weights and the largest step,"
            f" {_named_step(config, num_tokens)}, take {peak}, other processes {memory.elsewhere}, reserved are"
            f" {config.reserved_bytes}; {_REMEDY}, or raise memory_fraction"
        )
    return left


@dataclass(frozen=True, slots=True)
class _Memory:
    """A GPU's memory in bytes: `total`, and the part `elsewhere` that other processes hold."""

    total: int
    elsewhere: int

    @classmethod
    def of(cls, device: torch.device) -> Self:
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, total - free - torch.cuda.memory_reserved(device))


def _named_step(config: EngineConfig, num_tokens: int) -> str:
    return (
        f"{num_tokens} tokens (max_num_batched_tokens is {config.max_num_batched_tokens}, max_num_seqs"
        f" {config.max_num_seqs})"
    )
