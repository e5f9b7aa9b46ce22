"""The engine's settings: plain values, without torch, that a configuration file can hold."""

from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from raylens.modeling.pooling import Pooling

DtypeName = Literal["float32", "bfloat16", "float16"]

_NUM_SEQS = {"cpu": 64, "cuda": 256}
_NUM_BATCHED_TOKENS = {"cpu": 384, "cuda": 8192}
"""Defaults by the type of the device. A GPU reads its weights once for all tokens of a step, so small steps would leave
it idle. On a CPU with AMX, the second cache holds the rows of 384 tokens beside some weights, but not of more."""
_OF_DEVICE: Any = None
"""The default of a number that `EngineConfig` fills in."""

# The reasons for refusing `quantization` on a GPU and `async_scheduling: true` with several ranks.
NO_QUANTIZATION_ON_GPU = (
    "weights are quantized on the CPU only. Take dtype bfloat16, and kv_cache_dtype float8_e4m3fn for a cache of more"
    " positions if the GPU supports it"
)
NO_ASYNC_WITH_RANKS = (
    "rank 0 sends each token to the other ranks with the next step, so it must wait; take null or false"
)


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class EngineSettings:
    """The settings of an engine that do not depend on its model. Raises ValueError that names the field."""

    block_size: Annotated[int, Field(ge=1)] = 16
    """tokens per block of the KV cache"""
    kv_cache_bytes: Annotated[int | None, Field(ge=1)] = None
    """bytes of the KV cache per rank, all layers together; null: 512 MiB on the CPU, on a GPU the part of
    memory_fraction that weights and the largest step leave"""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """share of a GPU's memory for weights, the largest step and the KV cache together; for a replica with a fraction of
    a GPU, the share of this fraction"""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    """numbers in the KV cache; auto: as `dtype`; smaller ones hold more positions, less exactly"""
    quantization: Literal["int8", "int4"] | None = None
    """int8 or int4, on the CPU: the weights of the decoder's layers in 8 or 4 bits, of embedding and head in 8"""
    prefix_caching: bool = True
    """reuse KV cache blocks of earlier requests of the same tenant that begin with the same tokens and items"""
    prompt_lookup: bool | None = None
    """guess an answer's next tokens from the tokens that followed the same ones before, and check several guesses in
    one step while few sequences decode; answers stay the same; null: on the CPU with Raylens' kernels"""
    async_scheduling: bool | None = None
    """launch each step before the host has read the previous step's tokens, so that a GPU does not wait for the host;
    answers stay the same; not with guessed tokens; null: on a GPU if one process computes the model"""
    max_num_seqs: Annotated[int | None, Field(ge=1)] = None
    """sequences running at once; null: 256 on a GPU, 64 on the CPU, and no more than max_num_batched_tokens"""
    max_num_batched_tokens: Annotated[int | None, Field(ge=1)] = None
    """most tokens of one step; null: 8192 on a GPU, 384 on the CPU, and no fewer than max_num_seqs"""
    max_decode_slowdown: Annotated[float | None, Field(gt=1)] = 9.0
    """longest duration of a step with prompts, as a multiple of a decode-only step's; the engine measures both and
    limits the prompt tokens of a step; null: only max_num_batched_tokens limits them"""
    max_loras: Annotated[int, Field(ge=0, le=256)] = 0
    """LoRA adapters of the language model in memory at once; requests for others wait until one is no longer used; 0:
    no adapters are served"""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """highest rank of an adapter; each of max_loras takes memory for this rank"""

    @model_validator(mode="after")
    def _budget_covers_every_sequence(self) -> Self:
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is not None and num_tokens is not None and num_tokens < num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({num_tokens}) must be at least max_num_seqs ({num_seqs}): each sequence"
                " decodes one token a step"
            )
        return self


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class EngineConfig(EngineSettings):
    """The settings of one model's engine. `model` is a folder or a hub id.

    `max_num_seqs` and `max_num_batched_tokens` default to the device's numbers, never to None.
    `allow_longer_context`: whether `max_model_len` may exceed the number of positions that the model is made for.
    `exact`: whether float32 means float32 on the CPU. Otherwise the products of a model stored in bfloat16 or float16
    may round their inputs to the bits of that dtype.
    `gpu_share`: the part of a GPU's memory that `memory_fraction` is a fraction of. Other processes have the rest.
    `reserved_bytes`: the GPU memory left to other work of this process.
    `num_threads`: the most threads of Raylens' kernels on the CPU. None: one for each core, but 16 at most.
    `largest_item_tokens`: the positions of the model's largest picture in a prompt. The engine does not start if its
    context has no room for it. A span is at most `largest_item_tokens` + `max_num_batched_tokens` long.
    `pooling`: of prompts to be embedded or scored. None: the model only generates."""

    model: str
    _: KW_ONLY
    revision: str | None = None
    dtype: DtypeName = "float32"
    exact: bool = True
    device: str = "cpu"
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    num_threads: Annotated[int | None, Field(ge=1)] = None
    max_model_len: Annotated[int | None, Field(ge=1)] = None
    allow_longer_context: bool = False
    largest_item_tokens: Annotated[int, Field(ge=0)] = 0
    pooling: Pooling | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] = _OF_DEVICE
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = _OF_DEVICE

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_the_device(cls, given: ArgsKwargs) -> ArgsKwargs:
        """Fills in the numbers that are not set. A number that is set bounds the other one."""
        settings = dict(given.kwargs or {})
        kind = "cpu" if settings.get("device", "cpu") == "cpu" else "cuda"
        num_seqs, num_tokens = settings.get("max_num_seqs"), settings.get("max_num_batched_tokens")
        if num_seqs is None:
            num_seqs = _NUM_SEQS[kind] if num_tokens is None else min(_NUM_SEQS[kind], num_tokens)
        if num_tokens is None:
            num_tokens = max(_NUM_BATCHED_TOKENS[kind], num_seqs)
        return ArgsKwargs(given.args, settings | {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens})

    @model_validator(mode="after")
    def _quantization_suits_the_device(self) -> Self:
        if self.quantization is not None and self.device.startswith("cuda"):
            raise ValueError(f"quantization: {NO_QUANTIZATION_ON_GPU}")
        return self
