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
    """A unit of encoding: a whole item, or a stretch of its frames or tiles. `num_patches`: its cost."""

    tensors: ItemTensors
    num_patches: int


@dataclass(slots=True)
class EncodeRequest:
    """One item to encode, in one or more segments. Only items with equal `batch_key`s share a batch. `arrival_time`: in
    seconds of `time.perf_counter`.

    The scheduler and the engine keep the item's progress in the other fields. `next_index`: of the first waiting
    segment. `patches_left`: of all waiting segments. `embeddings`: of the encoded segments, in order.
    `encode_seconds`: the time with at least one segment in encoding. `encoded_until`: the end of the latest one, in
    seconds of `time.perf_counter`. `is_over`: the item was aborted or has failed."""

    request_id: str
    modality: str
    segments: Sequence[Segment]
    batch_key: Hashable
    arrival_time: float
    next_index: int = 0
    patches_left: int = 0
    embeddings: "list[torch.Tensor]" = field(default_factory=list)
    encode_seconds: float = 0.0
    encoded_until: float = 0.0
    is_over: bool = False

    @property
    def next_patches(self) -> int:
        """Returns the patches of the first waiting segment."""
        return self.segments[self.next_index].num_patches


@dataclass(frozen=True, slots=True)
class ScheduledSegment:
    """A segment to encode next. `index`: its place in `request.segments`."""

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

    With overlapped staging, the embeddings of a single-segment item are in pinned memory.

    `encode_seconds`: the time with at least one segment in encoding; for a single-segment item, the time of its batch.
    `queue_seconds`: the rest of the time from the item's arrival to its output. `batch_size`: the number of segments in
    the last batch, each of another item."""

    request_id: str
    embeddings: "torch.Tensor | None"
    error: Exception | None
    queue_seconds: float
    encode_seconds: float
    batch_size: int
