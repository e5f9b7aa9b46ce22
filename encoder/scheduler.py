"""Chooses which waiting items are encoded together. A batch is bounded by its patches, not by its number of items."""

from collections import OrderedDict
from collections.abc import Iterator

from encoder.schema import EncodeRequest


class EncoderScheduler:
    """Makes batches of at most `max_batch_patches` patches, of items that may go through the tower together.

    An item is big if it has more than half of `max_batch_patches`, and small otherwise. The oldest waiting item leads
    a batch, and small items join it by age as far as they fit. There is one exception: after a batch that a big item
    led, the oldest waiting small item leads the next batch. Big items only ever lead. So

    - at most one big item is encoded before the next batch that a waiting small item leads;
    - of any two batches in a row, one is led by the oldest waiting item. So nothing starves: an item with n older ones
      before it is in one of the next 2 (n + 1) batches.

    An item of more than `max_batch_patches` is encoded alone. The caller must not add an item that is too large to be
    encoded at all.
    """

    def __init__(self, max_batch_patches: int) -> None:
        self.max_batch_patches = max_batch_patches
        self._waiting: OrderedDict[str, EncodeRequest] = OrderedDict()
        self._last_was_big = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EncodeRequest) -> None:
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is waiting already")
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def schedule(self) -> list[EncodeRequest]:
        """Takes the next batch off the queue and returns it. It is empty when no item waits."""
        leader = self._leader()
        if leader is None:
            return []
        batch = [leader, *self._joining(leader)]
        for request in batch:
            del self._waiting[request.request_id]
        self._last_was_big = self.is_big(leader)
        return batch

    def is_big(self, request: EncodeRequest) -> bool:
        """Returns whether the item has more than half of `max_batch_patches`, so that no two such items fit a batch."""
        return 2 * request.num_patches > self.max_batch_patches

    def _leader(self) -> EncodeRequest | None:
        oldest = next(iter(self._waiting.values()), None)
        if self._last_was_big:
            return next((request for request in self._waiting.values() if not self.is_big(request)), oldest)
        return oldest

    def _joining(self, leader: EncodeRequest) -> Iterator[EncodeRequest]:
        room = self.max_batch_patches - leader.num_patches
        for request in self._waiting.values():
            fits = request.num_patches <= room and not self.is_big(request)
            if request is not leader and fits and request.batch_key == leader.batch_key:
                room -= request.num_patches
                yield request
