"""References to the results of a call, before and after these exist, or after the stage has failed.

tests/deployments/routing/test_room_router.py sends such calls through Ray Serve."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica_result import ActorReplicaResult
from ray.serve.request_router import PendingRequest

from raylens.deployments.ray_internals.calls_ahead import NOT_ASKED, CallAhead, ReplicaForCallsAhead, results_of


class Stage:
    """Has the methods of Ray Serve's replica that are called."""

    async def handle_request(self, metadata: bytes, ending: str) -> tuple[str, str]:
        await asyncio.sleep(0.3)
        if ending == "error":
            raise ValueError("a bug")
        if ending == "death":
            os._exit(1)
        return "tensors", "info"


class NextStage:
    async def receive(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return [await ref for ref in refs]


def actor(kind: type) -> Any:
    return ray.remote(num_cpus=0)(kind).remote()


def replica(stage: Any) -> ReplicaForCallsAhead:
    info: Any = SimpleNamespace(multiplexed_model_ids=[], is_cross_language=False, get_actor_handle=lambda: stage)
    return ReplicaForCallsAhead(info, {"two": 2})


def request(method: str, *args: Any) -> PendingRequest:
    return PendingRequest([*args], {}, RequestMetadata("request", "internal", method))


class Response:
    """As much of Ray Serve's response as is used."""

    def __init__(self, ending: str) -> None:
        self.sent = replica(actor(Stage)).try_send_request(request("two", ending), with_rejection=True)

    async def _fetch_future_result_async(self) -> Any:
        return self.sent


async def test_a_stage_answers_with_a_reference_and_a_value(ray_port: int) -> None:
    response: Any = Response("none")
    (tensors, _), info = await asyncio.wait_for(results_of(response), 60)
    assert info == "info"
    assert isinstance(tensors, ray.ObjectRef)
    del response
    assert await tensors == "tensors", "it lives as long as its reference"


@pytest.mark.parametrize("ending", ["error", "death"])
async def test_a_stage_that_fails_gives_no_result(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    with pytest.raises(RayError, match=None if ending == "death" else "a bug"):
        await asyncio.wait_for(results_of(response), 60)


@pytest.mark.parametrize("ending", ["none", "error"])
async def test_the_next_stage_gets_the_reference_before_the_tensors_are_there(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    pending: asyncio.Future[ray.ObjectRef] = asyncio.get_running_loop().create_future()
    work = asyncio.create_task(results_of(response, lambda tensors, info: pending.set_result(tensors)))
    received = actor(NextStage).receive.remote([await asyncio.wait_for(pending, 60)])
    assert not work.done()
    if ending == "none":
        assert await received == ["tensors"]
        refs, info = await work
        assert (refs[0], info) == (pending.result(), "info")
    else:
        for waiting in (received, work):
            with pytest.raises(RayError, match="a bug"):
                await waiting


@pytest.mark.parametrize("ending", ["none", "error"])
async def test_all_listeners_hear_of_the_end(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    told: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(2):
        response.sent.add_done_callback(told.put_nowait)
    heard = [await asyncio.wait_for(told.get(), 60) for _ in range(2)]
    assert all(one == "info" if ending == "none" else isinstance(one, RayError) for one in heard)


async def test_the_replica_takes_the_call_without_a_question(ray_port: int) -> None:
    response: Any = Response("none")
    told = await response.sent.get_rejection_response()
    assert (told.accepted, told.num_ongoing_requests) == (True, NOT_ASKED)


async def test_the_replica_is_asked_about_any_other_call(ray_port: int) -> None:
    asked: list[bool] = []

    def send(pr: PendingRequest, *, with_rejection: bool) -> ActorReplicaResult:
        asked.append(with_rejection)
        return ActorReplicaResult(ray.put("sent"), pr.metadata)

    taker = replica(actor(Stage))
    taker._get_replica_wrapper = lambda pr: SimpleNamespace(send_request_python=send)
    assert not isinstance(taker.try_send_request(request("one"), with_rejection=True), CallAhead)
    assert asked == [True]
