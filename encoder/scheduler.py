"""Chooses what is encoded together. A batch is bounded by its patches, not by its number of items."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raylens.encoder.schema import EncodeRequest, ScheduledSegment


@dataclass(slots=True)
class _Waiting:
    """An item of which segments wait: those from number `next_index` on, of `patches_left` patches."""

    request: EncodeRequest
    next_index: int
    patches_left: int

    @property
    def next_segment(self) -> ScheduledSegment:
        return ScheduledSegment(self.request, self.next_index)

    @property
    def num_patches(self) -> int:
        """Returns the patches of the next segment."""
        return self.request.segments[self.next_index].num_patches


class EncoderScheduler:
    """Makes batches of at most `max_batch_patches` patches: shortest first, with aging.

    One item leads a batch with its next segment. Next segments of other items that may go through the tower together
    with it join as far as they fit, in the order in which their items would lead. A segment is big if it has more than
    half of `max_batch_patches`; big segments only ever lead. One of more than `max_batch_patches` is encoded alone. The
    caller must not add an item with a segment that is too large to be encoded at all.

    A batch costs its patches, or `max_batch_patches` if that is more. The oldest item leads a batch. Batches that cost
    no more than that one, all together, are then led by the item that has the fewest patches left. Then the oldest item
    leads again, and so on. A batch counts as the oldest item's if that item has the fewest patches left. So

    - no two batches in a row are led by the oldest item, while another one has fewer patches left and a next segment of
      at most `max_batch_patches`. A small item that is the shortest thus waits for one such batch at most, besides what
      is launched already when it comes: however many large items are there, and however large.
    - nothing starves: an item's last segment is encoded with the n-th batch that the oldest item leads, or earlier,
      where n counts the segments of this and of all older items that wait when the item comes. Behind a batch of p
      patches that the oldest item led, at most max(p, `max_batch_patches`) patches are encoded before it leads the next
      one. So the oldest item's batches get at least half of all patches, if each of them is full.

    The segments of an item are encoded in their order, at most one in a batch.
    """

    def __init__(self, max_batch_patches: int) -> None:
        self.max_batch_patches = max_batch_patches
        self._waiting: dict[str, _Waiting] = {}
        """By age."""
        self._credit = 0
        """The cost of batches that the shortest item may lead before the oldest leads one."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_patches(self) -> int:
        """Returns the patches of all segments that wait. Other threads may ask, too."""
        return sum(item.patches_left for item in list(self._waiting.values()))

    def add(self, request: EncodeRequest) -> None:
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is waiting already")
        patches_left = sum(segment.num_patches for segment in request.segments)
        self._waiting[request.request_id] = _Waiting(request, 0, patches_left)

    def abort(self, request_id: str) -> EncodeRequest | None:
        """Takes all segments off the queue that still wait, and returns their item. Returns None if none waits."""
        item = self._waiting.pop(request_id, None)
        return None if item is None else item.request

    def schedule(self) -> list[ScheduledSegment]:
        """Takes the next batch off the queue and returns it. It is empty when no item waits."""
        if not self._waiting:
            return []
        items = list(self._waiting.values())
        oldest = items[0]
        shortest_first = sorted(items, key=lambda item: item.patches_left)  # the older first of two that are equal
        leader = next((item for item in shortest_first if self._cost(item.num_patches) <= self._credit), None)
        order = items if leader is None else shortest_first
        leader = leader or oldest
        chosen = [leader, *self._joining(leader, order)]
        cost = self._cost(sum(item.num_patches for item in chosen))
        self._credit = cost if leader is oldest else self._credit - cost
        return [self._take(item) for item in chosen]

    def is_big(self, num_patches: int) -> bool:
        """Returns whether a segment has more than half of `max_batch_patches`, so that no two such fit a batch."""
        return 2 * num_patches > self.max_batch_patches

    def _cost(self, num_patches: int) -> int:
        return max(self.max_batch_patches, num_patches)

    def _joining(self, leader: _Waiting, order: Sequence[_Waiting]) -> Iterator[_Waiting]:
        room = self.max_batch_patches - leader.num_patches
        for item in order:
            fits = item.num_patches <= room and not self.is_big(item.num_patches)
            if item is not leader and fits and item.request.batch_key == leader.request.batch_key:
                room -= item.num_patches
                yield item

    def _take(self, item: _Waiting) -> ScheduledSegment:
        taken = item.next_segment
        item.next_index += 1
        item.patches_left -= taken.num_patches
        if taken.is_last:
            del self._waiting[item.request.request_id]
        return taken
