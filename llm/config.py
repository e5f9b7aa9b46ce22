"""The engine's settings: plain values, without torch, that a configuration file can hold."""

from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

DtypeName = Literal["float32", "bfloat16", "float16"]

_NUM_SEQS = {"cpu": 64, "cuda": 256}
_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
"""By the type of the device: how many sequences run at once, and how many tokens a step has, where the settings say
nothing. A GPU reads its weights once for all tokens of a step, so small steps would leave it idle."""
_OF_DEVICE: Any = None
"""The default of a number that `EngineConfig` fills in."""

NO_INT8_ON_GPU = (
    "int8 weights are for the CPU: PyTorch's kernel for them leaves a GPU's tensor cores idle. Take dtype bfloat16"
    " there, and kv_cache_dtype float8_e4m3fn for a cache of more positions where the GPU has such numbers"
)
"""Why `quantization: int8` is refused there."""

NO_ASYNC_WITH_RANKS = (
    "a model divided among ranks waits for each token, which rank 0 tells the others with the next step; take null or"
    " false"
)
"""Why `async_scheduling: true` is refused there."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EngineSettings:
    """The settings of an engine that do not depend on its model. Raises ValueError that names the field."""

    block_size: Annotated[int, Field(ge=1, description="tokens per block of the KV cache")] = 16
    kv_cache_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            description="bytes of the KV cache per rank, all layers together; null: what memory_fraction of a GPU"
            " leaves, 512 MiB on the CPU",
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="share of a GPU's memory for weights, the largest step and the KV cache together; of a replica"
            " with a fraction of a GPU, the share of this fraction",
        ),
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float8_e4m3fn"],
        Field(description="numbers in the KV cache; auto: as `dtype`; smaller ones hold more positions, less exactly"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8"] | None,
        Field(description="int8, on the CPU: the weights of the decoder's layers in 8 bits, a scale for each output"),
    ] = None
    prefix_caching: Annotated[
        bool,
        Field(
            description="take up what earlier requests of the same tenant left in the KV cache of the same beginning"
        ),
    ] = True
    prompt_lookup: Annotated[
        bool | None,
        Field(
            description="guess an answer's next tokens from what followed the same tokens before, and compute several"
            " in one step where few sequences decode; answers stay the same; null: on the CPU with Raylens' kernels"
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        Field(
            description="launch each step before the last one's tokens are read, so that a GPU need not wait for the"
            " host between two steps; answers stay the same; not beside guessed tokens; null: on a GPU where one"
            " process computes the model"
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Field(
            ge=1,
            description="sequences running at once; null: 256 on a GPU, 64 on the CPU, and no more than"
            " max_num_batched_tokens",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="tokens of one step at most; null: 8192 on a GPU, 512 on the CPU, and no fewer than"
            " max_num_seqs",
        ),
    ] = None
    max_decode_slowdown: Annotated[
        float | None,
        Field(
            gt=1,
            description="how many times as long as a step that only decodes a step may take that also computes prompts;"
            " the engine measures both and takes up as many tokens of prompts; null: as many as"
            " max_num_batched_tokens allows",
        ),
    ] = 9.0
    max_loras: Annotated[
        int,
        Field(
            ge=0,
            le=256,
            description="LoRA adapters of the language model in memory at once; requests for others wait until one is"
            " no longer used; 0: no adapters are served",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Field(ge=1, le=512, description="the highest rank of an adapter; each of max_loras takes memory for this rank"),
    ] = 16

    @model_validator(mode="after")
    def _budget_covers_every_sequence(self) -> Self:
        if self.max_num_seqs is None or self.max_num_batched_tokens is None:
            return self
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}), for each decodes one token a step"
            )
        return self


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class EngineConfig(EngineSettings):
    """The settings of one model's engine. `model` is a folder or a hub id.

    `max_num_seqs` and `max_num_batched_tokens` are numbers here: those of the device where the settings have none.
    `allow_longer_context`: whether `max_model_len` may exceed the number of positions that the model is made for.
    `gpu_share`: the part of a GPU's memory that `memory_fraction` is a fraction of. Other processes have the rest.
    `reserved_bytes`: how much of a GPU's memory the engine leaves to other work of its process.
    `num_threads`: the most threads of Raylens' kernels on the CPU. None: one for each core, but 16 at most.
    `largest_item_tokens`: the positions that the model's largest picture takes in a prompt. The engine does not start
    where its context has no room for that picture. Tokens that attend to each other go in one step. They may be as many
    as `largest_item_tokens` and `max_num_batched_tokens` together.
    """

    model: str
    _: KW_ONLY
    revision: str | None = None
    dtype: DtypeName = "float32"
    device: str = "cpu"
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    num_threads: Annotated[int | None, Field(ge=1)] = None
    max_model_len: Annotated[int | None, Field(ge=1)] = None
    allow_longer_context: bool = False
    largest_item_tokens: Annotated[int, Field(ge=0)] = 0
    max_num_seqs: Annotated[int, Field(ge=1)] = _OF_DEVICE
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = _OF_DEVICE

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_the_device(cls, given: ArgsKwargs) -> ArgsKwargs:
        """Fills in the numbers that are not set. One that is set bounds the other, so that they always fit."""
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
        if self.quantization == "int8" and self.device.startswith("cuda"):
            raise ValueError(f"quantization: {NO_INT8_ON_GPU}")
        return self
