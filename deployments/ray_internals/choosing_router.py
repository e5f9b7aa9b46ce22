"""A request router that chooses a replica for each call in the coroutine that sends the call.

Ray 2.60: `RequestRouter` queues calls, and routing tasks choose their replicas. The queues know a call by its internal
request id, which all parallel calls of one request share, so the second one waits until the process ends. A replica
with room gets the oldest call, even of a method that has reached its limit there, and all later calls wait behind it.
Needed: many parallel calls for one request. An error of the choice reaches its caller, a cancellation ends it, and each
sent call counts when the next one chooses.
Test: `tests/deployments/ray_internals/test_choosing_router.py`;
`tests/deployments/routing/test_room_router.py`, `test_requests_side_by_side_make_many_calls_at_once` on a real cluster.
Way back: an id for each call in `RequestRouter` (ray-project/ray#62906 brought a router on the same queues)."""

import math
from collections.abc import Coroutine, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from raylens.deployments.ray_internals.calls_ahead import ReplicaForCallsAhead


class ChoosingRouter(RequestRouter):
    """Subclasses define `choose`. It replaces the queues, the routing tasks and the index of the base class."""

    num_results: Mapping[str, int] = {}
    """Per method of calls ahead: the number of its results."""

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        """Returns the replica for this call; waits until one has room."""
        raise NotImplementedError

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        raise AssertionError("Ray's routing tasks do not run")

    def probe(self, replica: RunningReplica, attempt: int) -> Coroutine[Any, Any, Any]:
        """Asks the replica for its load, which goes into `replica_queue_len_cache`."""
        probing: Coroutine[Any, Any, Any] = self._probe_queue_lens([replica], attempt)
        return probing

    def keep_reports(self) -> None:
        """Keeps the replicas' last reports of their loads. Ray forgets a report after 10 s."""
        self.replica_queue_len_cache._staleness_timeout_s = math.inf

    def backoff_s(self, attempt: int) -> float:
        return float(self._compute_backoff_s(attempt))

    def now_s(self) -> float:
        return float(self._get_curr_time_s())

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return ReplicaForCallsAhead(replica_info, self.num_results)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        replica = await self.choose(pending_request)
        self._record_queue_wait_time(pending_request)
        return replica
