"""Which waiting items are encoded together."""

from collections import OrderedDict

from encoder.schema import EncodeRequest


class EncoderScheduler:
    """First come, first served: the oldest item sets the batch's shape, others of that shape join it in order."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._waiting: OrderedDict[str, EncodeRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EncodeRequest) -> None:
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is waiting already")
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def schedule(self) -> list[EncodeRequest]:
        """Takes the next batch off the queue: 1 to `max_batch_size` items of one shape; empty when none waits."""
        batch: list[EncodeRequest] = []
        for request in self._waiting.values():
            if len(batch) == self._max_batch_size:
                break
            if not batch or request.batch_key == batch[0].batch_key:
                batch.append(request)
        for request in batch:
            del self._waiting[request.request_id]
        return batch
