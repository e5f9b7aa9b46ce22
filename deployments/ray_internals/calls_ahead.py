"""Calls that are sent ahead: their arguments are references to results that other calls still compute.

Ray 2.60: with each call, Ray Serve asks the replica whether it has room. The question travels with the call, and Ray
holds a call back until its arguments exist. So the caller waits for the arguments before it can hand on references to
the call's own results.
Needed: Encode and Generate get references while Preprocess still works. A replica takes a call that is sent ahead
without a question. If it is full when the arguments arrive, the call waits in the replica.
Test: `tests/deployments/ray_internals/test_calls_ahead.py`; `tests/deployments/routing/test_room_router.py`,
`test_the_results_of_a_call_that_waits_for_its_arguments_can_be_handed_on` on a real cluster.
Way back: an answer before the arguments exist, or calls without a question. ray-project/ray#65243 (open) gives
references to results only once a replica has accepted the call."""

from ray import ObjectRef
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import ActorReplicaResult, ReplicaResult
from ray.serve.request_router import PendingRequest, RunningReplica

NOT_ASKED = None
"""Stands for the number of a replica's calls where the replica has not reported it."""


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
