"""Which waiting items are encoded together: batches by their cost in patches, not by their number."""

from collections import OrderedDict
from collections.abc import Iterator

from encoder.schema import EncodeRequest


class EncoderScheduler:
    """Batches of at most `max_batch_patches`, of items that may go through the tower together.

    An item of more than half of that is big: no two of them share a batch. The oldest item leads a batch and others
    join it by age, as far as they fit, with two exceptions: after a batch with a big item the next one is led by the
    oldest small item that waits, and a batch that a small item leads takes no big ones. So

    - a small item that waits sees at most one big item encoded before the next batch of small ones;
    - of any two batches in a row one is led by the oldest item of all: nothing starves, for an item with n older ones
      before it is in one of the next 2 (n + 1) batches.

    An item that costs more than `max_batch_patches` goes alone. What could never go at all is not to be added.
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
        """Takes the next batch off the queue; empty when nothing waits."""
        leader = self._leader()
        if leader is None:
            return []
        batch = [leader, *self._joining(leader)]
        for request in batch:
            del self._waiting[request.request_id]
        self._last_was_big = self.is_big(leader)
        return batch

    def is_big(self, request: EncodeRequest) -> bool:
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
