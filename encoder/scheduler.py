"""Chooses the batches. A batch is bounded by its patches, not by its number of items."""

from collections.abc import Iterator, Sequence

from raylens.encoder.schema import EncodeRequest, ScheduledSegment


class EncoderScheduler:
    """Builds batches of at most `max_batch_patches` patches: shortest first, with aging.

    One item leads a batch with its next segment. Next segments of other items with the same batch key join while they
    fit, in the order in which their items would lead. A segment is big if it has more than half of `max_batch_patches`;
    big segments only lead. A segment of more than `max_batch_patches` is encoded alone. The caller must not add an item
    with a segment too large to be encoded at all.

    A batch costs its patches, but at least `max_batch_patches`. The oldest item leads a batch. The item with the fewest
    patches left then leads batches with the same total cost at most. Then the oldest item leads again, and so on. A
    batch counts as the oldest item's if that item has the fewest patches left. Two properties follow:

    - The oldest item never leads two consecutive batches while another item has fewer patches left and a next segment
      of at most `max_batch_patches`. The shortest item thus waits for at most one such batch, besides the batches
      launched before its arrival, for any number and size of large items.
    - Nothing starves. Let n be the number of waiting segments of an item and of all older items at its arrival. The
      item's last segment is then encoded no later than the n-th batch that the oldest item leads. After such a batch of
      p patches, at most max(p, `max_batch_patches`) patches are encoded before the next one. The oldest item's batches,
      if full, thus get at least half of all patches.

    The segments of an item are encoded in order, at most one in a batch."""

    def __init__(self, max_batch_patches: int) -> None:
        self.max_batch_patches = max_batch_patches
        self._waiting: dict[str, EncodeRequest] = {}
        """By age, the oldest first."""
        self._credit = 0
        """The cost of batches that the shortest item may lead before the oldest item leads one."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_patches(self) -> int:
        """Returns the patches of all waiting segments. Thread-safe."""
        return sum(item.patches_left for item in list(self._waiting.values()))

    def add(self, request: EncodeRequest) -> None:
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is waiting already")
        request.patches_left = sum(segment.num_patches for segment in request.segments)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> EncodeRequest | None:
        """Removes all waiting segments of an item and returns the item, or None if there are none."""
        return self._waiting.pop(request_id, None)

    def schedule(self) -> list[ScheduledSegment]:
        """Removes the next batch from the queue and returns it. It is empty if no item waits."""
        if not self._waiting:
            return []
        items = list(self._waiting.values())
        oldest = items[0]
        shortest_first = sorted(items, key=lambda item: item.patches_left)  # stable: the older of equal ones first
        leader = next((item for item in shortest_first if self._cost(item.next_patches) <= self._credit), None)
        order = items if leader is None else shortest_first
        leader = leader or oldest
        chosen = [leader, *self._joining(leader, order)]
        cost = self._cost(sum(item.next_patches for item in chosen))
        self._credit = cost if leader is oldest else self._credit - cost
        return [self._take(item) for item in chosen]

    def _cost(self, num_patches: int) -> int:
        return max(self.max_batch_patches, num_patches)

    def _joining(self, leader: EncodeRequest, order: Sequence[EncodeRequest]) -> Iterator[EncodeRequest]:
        room = self.max_batch_patches - leader.next_patches
        for item in order:
            fits = item.next_patches <= room and 2 * item.next_patches <= self.max_batch_patches
            if item is not leader and fits and item.batch_key == leader.batch_key:
                room -= item.next_patches
                yield item

    def _take(self, item: EncodeRequest) -> ScheduledSegment:
        taken = ScheduledSegment(item, item.next_index)
        item.next_index += 1
        item.patches_left -= taken.num_patches
        if taken.is_last:
            del self._waiting[item.request_id]
        return taken
