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

    def find(self, tenant: str, request_id: str) -> bytes | None:
        """Returns the record of the tenant's request, None where it is not known (any more)."""
        return self._records.get((tenant, request_id))
