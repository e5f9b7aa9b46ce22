"""Messages between the ingress and the stages, besides tensors.

A stage that makes tensors answers with two objects: first the tensors, then a description of them, which proves that
the tensors are whole. The caller passes a reference to the first on, unread, as early as it likes, and reads the
second. The caller owns both, so they outlive the replica that made them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from raylens.deployments.request_context import NO_REQUEST, RequestContext
from raylens.preprocess.schema import ItemInfo, ProcessorIdentity, Prompt, PromptTruncation, StageTime, ToolCallFormat

DECODE = "decode"
"""The stage time from the first token to the last. It is a span, but no stage of the waterfall."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's facts for the ingress: its processor's identity, the context in tokens, the kinds of items
    that it takes, and how calls of tools look in its answers, None where its chat template knows no tools."""

    processor: ProcessorIdentity
    max_model_len: int
    modalities: tuple[str, ...]
    tool_calls: ToolCallFormat | None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A stage's sign of life: seconds since its engine last moved, and what it knows of the model, if that is told.
    `details`: what it tells of itself in `/health`. `adapters`: the LoRA adapters by name, if it is Generate,
    each with the reason why it cannot be served, or None."""

    age_s: float = 0.0
    served: ServedModel | None = None
    details: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class ItemJob:
    """One item for the processor. `content`: its bytes, or a reference to an array of them; `num_pixels`: its work, see
    `preprocess/pixel_count.py`; `num_in_prompt`: items of its modality in the prompt; `options`: the client's settings;
    `is_precomputed`: `content` is tensors without a pixel to decode, see `preprocess/precomputed.py`. `context`: of the
    request that it is made for."""

    modality: str
    content: bytes | ObjectRef
    num_pixels: int
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool = False
    context: RequestContext = NO_REQUEST


@dataclass(frozen=True, slots=True)
class UnrenderedPrompt:
    """A prompt that Generate renders itself, with the content hashes and the metadata of its items, see
    `PromptRenderer.render`."""

    prompt: Prompt
    truncation: PromptTruncation | None
    mm_hashes: Sequence[str] = ()
    items: Sequence[ItemInfo] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """The metadata of an item's embeddings. `num_decoding`: the answers that the same replica was
    decoding, which waited meanwhile. `arrived_at`: when the item came, wall time in seconds; `place`: to which process.
    Its times follow each other. For an item in several batches, the waits between them count in the queue."""

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
    """A token, what it stands for in bytes (maybe a part of a character), its log-probability in nats, None for the
    first of a prompt, and the likeliest tokens at its place with theirs. `offset`, of an answer's: the character of its
    text in which the token begins."""

    token_id: int
    content: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]
    offset: int = 0


@dataclass(slots=True)
class GeneratedText:  # not frozen, which takes four times as long to make: there is one for each token
    """A piece of answer `index` of a request. `times` holds the stage times that became known with it.

    `logprobs` of its tokens and, on the first piece of answer 0, `prompt_logprobs` of the prompt's, where they were
    asked for.
    """

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    times: list[StageTime]
    index: int = 0
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
