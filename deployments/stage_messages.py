"""What the stages are told and what they answer, besides tensors; small enough to travel by value.

A stage that makes tensors answers with two objects: first the tensors, then what is known of them, which is the proof
that they are whole. The caller passes a reference to the first on, unread, as early as it likes, and reads the second.
Both are owned by the caller, so they outlive the replica that made them.
"""

from dataclasses import dataclass
from typing import Any

from preprocess.schema import ProcessorIdentity


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A stage's sign of life: seconds since its engine last moved, and the processor's identity if it has one."""

    age_s: float = 0.0
    processor: ProcessorIdentity | None = None


@dataclass(frozen=True, slots=True)
class ItemJob:
    """One item for the processor. `num_in_prompt`: items of its modality in the prompt; `options`: the client's
    settings; `is_precomputed`: `content` is tensors, see `preprocess.precomputed`."""

    modality: str
    content: bytes
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """What is known of an item's embeddings besides the tensor. Times in seconds."""

    num_bytes: int
    transfer_seconds: float
    queue_seconds: float
    encode_seconds: float


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A piece of an answer. `seconds` holds the stage times that became known with it, by stage name."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    seconds: dict[str, float]
