"""What was measured of the latest requests, for those who ask where the time of one went."""

from collections import OrderedDict


class RecentTraces:
    """The records of the last `max_traces` requests, by their ids. Each belongs to a tenant: two tenants may give their
    requests the same id, and none sees the other's."""

    def __init__(self, max_traces: int) -> None:
        self._max_traces = max_traces
        self._records: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, tenant: str, request_id: str, record: bytes) -> None:
        self._records[tenant, request_id] = record
        self._records.move_to_end((tenant, request_id))
        while len(self._records) > self._max_traces:
            self._records.popitem(last=False)

    def find(self, tenant: str | None, request_id: str) -> bytes | None:
        """Returns the record of the tenant's request, or of the latest with this id where `tenant` is None. Returns
        None where none is known (any more)."""
        if tenant is not None:
            return self._records.get((tenant, request_id))
        return next((self._records[key] for key in reversed(self._records) if key[1] == request_id), None)
