"""A replica is not asked about calls with references. tests/deployments/routing/test_room_router.py sends such
calls."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray import ObjectRef
from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica_result import ActorReplicaResult
from ray.serve.request_router import PendingRequest

from raylens.deployments.ray_internals.choosing_router import NOT_ASKED, CallAhead, ReplicaForCallsAhead

REF = ObjectRef(b"x" * 28)


def request(*args: Any, by_reference: bool = True, **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata("request", "internal", "method", _by_reference=by_reference)
    return PendingRequest([*args], kwargs, metadata)


class Wrapper:
    """Stands for the part of Ray's replica that sends."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def send_request_python(self, pr: PendingRequest, *, with_rejection: bool) -> ActorReplicaResult:
        self.asked.append(with_rejection)
        return ActorReplicaResult(REF, pr.metadata, with_rejection=with_rejection)


@pytest.fixture
def wrapper() -> Wrapper:
    return Wrapper()


@pytest.fixture
def replica(wrapper: Wrapper) -> ReplicaForCallsAhead:
    info: Any = SimpleNamespace(multiplexed_model_ids=[], is_cross_language=False, get_actor_handle=lambda: None)
    replica = ReplicaForCallsAhead(info)
    replica._get_replica_wrapper = lambda pr: wrapper
    return replica


@pytest.mark.parametrize("call", [request(REF), request(1, key=REF)], ids=["argument", "keyword"])
async def test_a_call_with_a_reference_is_taken_unasked(
    call: PendingRequest, replica: ReplicaForCallsAhead, wrapper: Wrapper
) -> None:
    sent = replica.try_send_request(call, with_rejection=True)
    assert wrapper.asked == [False]
    assert isinstance(sent, CallAhead)
    told = await sent.get_rejection_response()
    assert (told.accepted, told.num_ongoing_requests) == (True, NOT_ASKED)
    assert sent.to_object_ref() is REF


@pytest.mark.parametrize("call", [request(1), request([REF]), request(REF, by_reference=False)])
def test_the_replica_is_asked_about_any_other_call(
    call: PendingRequest, replica: ReplicaForCallsAhead, wrapper: Wrapper
) -> None:
    sent = replica.try_send_request(call, with_rejection=True)
    assert wrapper.asked == [True]
    assert type(sent) is ActorReplicaResult
