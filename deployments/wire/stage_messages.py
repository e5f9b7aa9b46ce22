"""Messages between the ingress and the stages, besides tensors.

A stage returns two objects: the tensors and their description. The caller forwards a reference to the tensors,
possibly pending, and reads the description only. The caller owns both, so they outlive the replica."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import NO_REQUEST, RequestContext
from raylens.modeling.pooling import Pooling
from raylens.preprocess.schema import ItemInfo, ProcessorIdentity, Prompt, PromptTruncation, StageTime
from raylens.preprocess.tool_calls.formats import ToolCallFormat

DECODE = "decode"
"""The stage time from the first to the last token. It is a span, but not part of the waterfall."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's facts for the ingress. `max_model_len`: in tokens. `tool_calls`: the format in its answers, None if
    the chat template supports no tools. `pooling`: of prompts to be embedded or scored, None if it only generates."""

    processor: ProcessorIdentity
    max_model_len: int
    modalities: tuple[str, ...]
    tool_calls: ToolCallFormat | None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A stage's sign of life: seconds since its engine last moved, and the model's facts if the stage reports them.
    `details`: the stage's entries in `/health`. `adapters`: Generate's LoRA adapters by name, each with the reason why
    it cannot be served, or None."""

    age_s: float = 0.0
    served: ServedModel | None = None
    details: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class ItemJob:
    """One item for the processor. `content`: its bytes, or a reference to an array of them. `num_pixels`: its work, see
    `preprocess/pixel_count.py`. `num_in_prompt`: items of its modality in the prompt. `options`: the client's settings.
    `is_precomputed`: `content` holds tensors instead of pixels, see `preprocess/precomputed.py`. `context`: of the
    originating request."""

    modality: str
    content: bytes | PackedReference
    num_pixels: int
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool = False
    context: RequestContext = NO_REQUEST


@dataclass(frozen=True, slots=True)
class UnrenderedPrompt:
    """A prompt for Generate to render, with its items' content hashes and metadata, see `PromptRenderer.render`."""

    prompt: Prompt
    truncation: PromptTruncation | None
    mm_hashes: Sequence[str] = ()
    items: Sequence[ItemInfo] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """The metadata of an item's embeddings. `num_decoding`: answers that waited in the same replica meanwhile.
    `arrived_at`: wall time in seconds. `place`: the encoding process. The times are consecutive; `queue_seconds`
    includes the waits between an item's batches."""

    num_bytes: int
    transfer_seconds: float
    queue_seconds: float
    encode_seconds: float
    num_decoding: int = 0
    arrived_at: float = 0.0
    place: str = ""

    @property
    def times(self) -> tuple[StageTime, ...]:
        arrived_at, waited, place = self.arrived_at, self.queue_seconds, self.place
        return (
            StageTime("transfer_pixels", arrived_at - self.transfer_seconds, self.transfer_seconds, place),
            StageTime("encode_queue", arrived_at, waited, place),
            StageTime("encode", arrived_at + waited, self.encode_seconds, place),
        )


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its bytes (possibly part of a character), its log-probability in nats (None for a prompt's first token)
    and its rank (1 is the likeliest). `top`: the likeliest tokens at its place, each with its id, bytes and
    log-probability. `offset`: the index of its first character in the answer."""

    token_id: int
    content: bytes
    logprob: float | None
    rank: int
    top: list[tuple[int, bytes, float]]
    offset: int = 0


@dataclass(slots=True)
class GeneratedText:  # not frozen: creation would take four times as long, once per token
    """A piece of answer `index` of a request. `thought`: the part of its text before the answer's own `text`.
    `num_thought_tokens`: of the answer so far. `stop`: the stop string that ended it. `times`: the stage times that
    became known with it. `pooled`: the vectors or scores of the prompt, each row as float32 bytes. On request,
    `logprobs` has the scores of its tokens, and the first piece of answer 0 those of the prompt's tokens."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    times: list[StageTime]
    index: int = 0
    thought: str = ""
    num_thought_tokens: int = 0
    stop: str | None = None
    pooled: list[bytes] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
