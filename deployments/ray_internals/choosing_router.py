"""A request router that chooses a replica for each call in the coroutine that sends the call, and calls ahead: calls
whose arguments are references to results that other calls still compute.

Ray 2.60: `RequestRouter` queues calls, and routing tasks choose their replicas. The queues know a call by its internal
request id, which all parallel calls of one request share, so the second one waits until the process ends. A replica
with room gets the oldest call, even of a method that has reached its limit there, and all later calls wait behind it.
With each call, Ray Serve asks the replica whether it has room. Ray holds call and question back until the arguments
exist; until then, the caller cannot hand on references to the call's own results.
Needed: many parallel calls for one request. An error of the choice reaches its caller, a cancellation ends it, and each
sent call counts when the next one chooses. Encode and Generate get references while Preprocess still works: a replica
takes a call ahead without a question. If it is full when the arguments arrive, the call waits in the replica.
Test: `tests/deployments/ray_internals/test_choosing_router.py`, `tests/deployments/ray_internals/test_calls_ahead.py`;
`tests/deployments/routing/test_room_router.py`, `test_requests_side_by_side_make_many_calls_at_once` and
`test_the_results_of_a_call_that_waits_for_its_arguments_can_be_handed_on` on a real cluster.
Way back: an id for each call in `RequestRouter` (ray-project/ray#62906 brought a router on the same queues), and an
answer before the arguments exist (#65243, open, gives references to results only of accepted calls)."""

import math
from collections.abc import Coroutine
from typing import Any

from ray import ObjectRef
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import ActorReplicaResult, ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

NOT_ASKED = None  # stands for the number of a replica's calls where the replica has not reported it


class CallAhead(ActorReplicaResult):
    """The result of a call that was sent ahead."""

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        return ReplicaQueueLengthInfo(accepted=True, num_ongoing_requests=NOT_ASKED)


class ReplicaForCallsAhead(RunningReplica):
    """Takes calls that are sent ahead without a question."""

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        if not (with_rejection and pr.metadata._by_reference and _is_ahead(pr)):
            return super().try_send_request(pr, with_rejection)
        sent = super().try_send_request(pr, with_rejection=False)
        return CallAhead(sent._obj_ref_gen or sent._obj_ref, pr.metadata)


def _is_ahead(request: PendingRequest) -> bool:
    """Returns whether an argument is a reference. Most of these are pending, and a router cannot tell."""
    return any(isinstance(argument, ObjectRef) for argument in (*request.args, *request.kwargs.values()))


class ChoosingRouter(RequestRouter):
    """Subclasses define `choose`. It replaces the queues, the routing tasks and the index of the base class."""

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        """Returns the replica for this call; waits until one has room."""
        raise NotImplementedError

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
        return ReplicaForCallsAhead(replica_info)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        replica = await self.choose(pending_request)
        self._record_queue_wait_time(pending_request)
        return replica
