"""The requests and outputs of the encoder engine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raylens.preprocess.schema import ItemTensors

if TYPE_CHECKING:
    # Not at run time: the scheduler needs no torch, and `raylens plan` runs it without.
    import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """A unit of encoding: a whole item, or a stretch of its frames or tiles. `num_patches` is its cost."""

    tensors: ItemTensors
    num_patches: int


@dataclass(slots=True)
class EncodeRequest:
    """One item to encode, in one or more segments. Items are encoded together only where their `batch_key`s are equal.
    `arrival_time` is in seconds of `time.perf_counter`.

    The engine keeps the item's progress in the other fields. `embeddings`: those of the segments that are encoded, in
    their order. `encode_seconds`: how long at least one segment was being encoded. `encoded_until`: when the last of
    them was done, in seconds of `time.perf_counter`. `is_over`: the item was aborted or has failed.
    """

    request_id: str
    modality: str
    segments: Sequence[Segment]
    batch_key: Hashable
    arrival_time: float
    embeddings: "list[torch.Tensor]" = field(default_factory=list)
    encode_seconds: float = 0.0
    encoded_until: float = 0.0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledSegment:
    """A segment that is encoded next, by its place in `request.segments`."""

    request: EncodeRequest
    index: int

    @property
    def tensors(self) -> ItemTensors:
        return self.request.segments[self.index].tensors

    @property
    def num_patches(self) -> int:
        return self.request.segments[self.index].num_patches

    @property
    def is_last(self) -> bool:
        """Returns whether it is the item's last segment."""
        return self.index == len(self.request.segments) - 1


@dataclass(slots=True)
class EncodeOutput:
    """The embeddings of one item, (num_embeds, embedding_size) on the CPU, or the error that ended the item.

    Overlapped staging puts the embeddings of an item of one segment into pinned memory. `queue_seconds` is the time
    from the item's arrival to the start of its batch, `encode_seconds` that of the whole batch, which had `batch_size`
    segments, each of another item. For an item of several segments, `encode_seconds` is all the time in which at least
    one of them was being encoded, `queue_seconds` is all the rest of the time from the item's arrival to its output,
    and `batch_size` is that of the last batch.
    """

    request_id: str
    embeddings: "torch.Tensor | None"
    error: Exception | None
    queue_seconds: float
    encode_seconds: float
    batch_size: int
