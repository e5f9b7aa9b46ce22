"""Calls whose callers get references to the results before these exist.

Ray 2.60: with each call, Ray Serve asks the replica whether it has room, and the answer is the first object of a
stream. Ray holds call and question back until the arguments exist. A call of Ray Serve has one result or a stream; each
object of a stream is a message of its own. For each listener of a call, Ray reads the result again.
Needed: the tensors of Preprocess and Encode are objects of their own, beside a description. Their caller hands on a
reference to pending tensors, and reads the description only. A method with several results returns them as a tuple. A
replica takes such a call without a question. If it is full, the call waits in the replica.
Test: `tests/deployments/ray_internals/test_calls_ahead.py`; `tests/deployments/routing/test_room_router.py`,
`test_the_results_of_a_call_that_waits_for_its_arguments_can_be_handed_on` on a real cluster.
Way back: a number of results in `DeploymentHandle.options`, and references before a replica has accepted the call
(ray-project/ray#46934 and #65243, open)."""

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray import ObjectRef
from ray.serve._private.common import ReplicaQueueLengthInfo, RequestMetadata
from ray.serve._private.replica_result import ActorReplicaResult, ReplicaResult
from ray.serve.handle import DeploymentResponse
from ray.serve.request_router import PendingRequest, RunningReplica

from raylens.deployments.ray_internals.handles import cancel_call

NOT_ASKED = None  # stands for the number of a replica's calls where the replica has not reported it


class CallAhead(ActorReplicaResult):
    """A sent call. `refs`: to its results. The last one is read once, for all listeners."""

    def __init__(self, refs: Sequence[ObjectRef], metadata: RequestMetadata) -> None:
        self.refs = refs
        self._last: asyncio.Future[Any] = refs[-1].as_future(_internal=True)
        super().__init__(refs[-1], metadata)  # may listen already

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        return ReplicaQueueLengthInfo(accepted=True, num_ongoing_requests=NOT_ASKED)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._last.add_done_callback(lambda done: callback(done.exception() or done.result()))

    async def get_async(self) -> Any:
        return await asyncio.shield(self._last)


class ReplicaForCallsAhead(RunningReplica):
    """Takes calls of some methods without a question. `num_results`: by method."""

    def __init__(self, replica_info: Any, num_results: Mapping[str, int]) -> None:
        super().__init__(replica_info)
        self._send = {
            method: self._actor_handle.handle_request.options(num_returns=number).remote
            for method, number in num_results.items()
        }

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        send = self._send.get(pr.metadata.call_method)
        if send is None:
            return super().try_send_request(pr, with_rejection)
        sent = send(pickle.dumps(pr.metadata), *pr.args, **pr.kwargs)
        return CallAhead(sent if isinstance(sent, list) else [sent], pr.metadata)


async def results_of(
    response: DeploymentResponse[Any], on_pending: Callable[..., None] = lambda *refs: None
) -> tuple[Sequence[ObjectRef], Any]:
    """Returns references to the results of a call ahead, and the value of the last one. The call is routed on this
    loop.

    `on_pending` gets the references, one argument each, once the call is sent. If the stage fails, a reader of any of
    them gets the stage's error."""
    try:
        sent: Any = await response._fetch_future_result_async()
        on_pending(*sent.refs)
        return sent.refs, await sent.get_async()
    except asyncio.CancelledError:
        with suppress(Exception):  # the reason, if the call never reached a replica
            cancel_call(response)
        raise
