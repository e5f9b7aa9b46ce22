"""The types that `preprocess` hands to the other stages, and the error for input that a user can mend.

The only module of this package that `encoder` and `llm` may import.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    # Not at run time: a process that only passes references on needs the types of this module and never torch.
    import torch

ItemTensors: TypeAlias = "dict[str, torch.Tensor]"
"""Processor outputs of one item by name, e.g. `pixel_values` of shape (channels, height, width)."""


class InvalidRequestError(ValueError):
    """Input that the client has to change: which field, and why. `reason` never holds internals."""

    def __init__(self, reason: str, *, field: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(f"{field}: {reason}")
        self.reason = reason
        self.field = field
        self.code = code
        self.status = status

    def for_field(self, field: str) -> "InvalidRequestError":
        """The same error of another field: a library knows its argument, its caller the client's name for it."""
        return InvalidRequestError(self.reason, field=field, code=self.code, status=self.status)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by themselves; stages are processes.
        return _rebuild_error, (self.reason, self.field, self.code, self.status)


def _rebuild_error(reason: str, field: str, code: str, status: int) -> InvalidRequestError:
    return InvalidRequestError(reason, field=field, code=code, status=status)


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Half-open range [offset, offset + length) of prompt positions that one item's embeddings fill."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """What is known of one processed item besides its tensors; small enough to travel by value.

    `replacement` is the text that takes the place of the item's placeholder in the prompt,
    `num_tokens` the number of positions in it that take embeddings, `num_bytes` the size of its tensors.
    """

    modality: str
    num_tokens: int
    replacement: str
    num_bytes: int
    decode_seconds: float
    process_seconds: float


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt ready for the engine: `placeholders[i]` is filled by the item whose hash is `mm_hashes[i]`."""

    prompt_token_ids: list[int]
    placeholders: list[PlaceholderRange]
    mm_hashes: list[str]
