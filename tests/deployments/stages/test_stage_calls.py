"""What a call of a stage does when Ray fails it: what is sent again, what is not, and what reaches the client."""

import asyncio
import os
import random
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest
import ray
from google.protobuf.message import DecodeError
from ray.core.generated.common_pb2 import Address
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayError,
    RayTaskError,
)
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from raylens.deployments.item_store.ray_references import pack_reference, unpack_reference
from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.stages.engine_loop import EngineDiedError
from raylens.deployments.stages.stage_calls import (
    StageCalls,
    StageError,
    StageFailedError,
    StageUnavailableError,
    objects_of,
    with_pending,
)
from raylens.preprocess.schema import InvalidRequestError


class NotedCounter(Counter):
    """Notes the tags of each count."""

    def __init__(self) -> None:
        super().__init__("counted", "calls", "What is counted", stage=(), reason=())
        self.noted: list[dict[str, str]] = []

    def inc(self, amount: float = 1.0, **tags: str) -> None:
        self.noted.append(tags)


def ignore(*refs: Any) -> None:
    pass


def make_calls() -> tuple[StageCalls, NotedCounter, list[str]]:
    recomputed = NotedCounter()
    replies: list[str] = []
    return StageCalls(recomputed, replies.append), recomputed, replies


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real_sleep(min(seconds, 0.001)))


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("encode", "traceback", cause)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DEATHS = [
    ActorDiedError(),
    ActorUnavailableError("gone", None),
    DeploymentUnavailableError("Encode"),
    task_error(EngineDiedError("stopped")),
    caused_by(RayServeException("upstream crashed"), ActorDiedError()),
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda error: type(error).__name__)
async def test_a_call_that_died_is_sent_again(death: Exception) -> None:
    calls, recomputed, replies = make_calls()
    failures = [death, death]

    async def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert await calls.send("encode", call) == "answer"
    assert [tags["stage"] for tags in recomputed.noted] == ["encode", "encode"]
    assert replies == ["encode"]


@pytest.mark.parametrize("death", DEATHS, ids=lambda error: type(error).__name__)
async def test_a_stage_that_keeps_dying_is_unavailable(death: Exception) -> None:
    calls, recomputed, replies = make_calls()

    async def call() -> str:
        raise death

    with pytest.raises(StageUnavailableError) as caught:
        await calls.send("encode", call)
    assert caught.value.stage == "encode"
    assert len(recomputed.noted) == 3
    assert replies == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (task_error(ValueError("a bug")), StageFailedError),
        (task_error(InvalidRequestError("too small", field="media")), InvalidRequestError),
        (task_error(ObjectLostError("00" * 28, None, "")), StageUnavailableError),
        (ObjectLostError("00" * 28, None, ""), StageUnavailableError),
        (caused_by(RayServeException("upstream crashed"), ObjectLostError("00" * 28, None, "")), StageUnavailableError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
async def test_an_answer_is_final(error: Exception, expected: type[Exception]) -> None:
    calls, recomputed, _ = make_calls()

    async def call() -> str:
        raise error

    with pytest.raises(expected) as caught:
        await calls.send("encode", call)
    assert recomputed.noted == []
    assert isinstance(caught.value, StageError | InvalidRequestError)


async def stage(ending: str) -> AsyncGenerator[Any]:
    """A stage's two objects, or what is left of them when it ends before, or in between."""
    await asyncio.sleep(0.3)
    if ending == "error at once":
        raise ValueError("a bug")
    yield "tensors"
    if ending == "error":
        raise ValueError("a bug")
    if ending == "death":
        os._exit(1)
    yield "info"


class Stage:
    async def run(self, ending: str) -> AsyncGenerator[Any]:
        async for one in stage(ending):
            yield one


class NextStage:
    async def receive(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return [await ref for ref in refs]


def actor(kind: type) -> Any:
    return ray.remote(num_cpus=0)(kind).remote()


class Response:
    """As much of Serve's response as is used."""

    def __init__(self, ending: str) -> None:
        self._actor = actor(Stage)
        self._refs = self._actor.run.options(num_returns="streaming").remote(ending)

    async def _to_object_ref_gen(self) -> Any:
        return self._refs


class Cancelled:
    """A call that Ray cancels, as it does when a replica dies, or that never answers."""

    def __init__(self, *, by_ray: bool) -> None:
        self._by_ray = by_ray
        self.is_cancelled = False

    async def _to_object_ref_gen(self) -> Any:
        if self._by_ray:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_call_that_ray_cancelled_is_sent_again() -> None:
    calls, recomputed, _ = make_calls()
    sent = [Cancelled(by_ray=True) for _ in range(4)]
    unsent = list[Any](sent)
    with pytest.raises(StageUnavailableError):
        await calls.send("encode", lambda: objects_of(unsent.pop(), 2, ignore))
    assert [tags["reason"] for tags in recomputed.noted] == ["TaskCancelledError"] * 3
    assert all(one.is_cancelled for one in sent)


async def test_a_caller_that_is_cancelled_ends_with_its_call() -> None:
    calls, recomputed, _ = make_calls()
    call: Any = Cancelled(by_ray=False)
    task = asyncio.create_task(calls.send("encode", lambda: objects_of(call, 2, ignore)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert call.is_cancelled
    assert recomputed.noted == []


async def test_a_stage_answers_with_a_reference_and_a_value(ray_port: int) -> None:
    response: Any = Response("none")
    (tensors, _), info = await asyncio.wait_for(objects_of(response, 2, ignore), 60)
    assert info == "info"
    assert isinstance(tensors, ray.ObjectRef)
    del response
    assert await tensors == "tensors", "it lives as long as its reference"


@pytest.mark.parametrize("ending", ["error at once", "error", "death"])
async def test_a_stage_that_ends_before_both_are_there_gives_none(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    with pytest.raises(RayError, match=None if ending == "death" else "a bug"):
        await asyncio.wait_for(objects_of(response, 2, ignore), 60)


@pytest.mark.parametrize("ending", ["none", "error at once"])
async def test_the_next_stage_gets_the_reference_before_the_tensors_are_there(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    pending: asyncio.Future[ray.ObjectRef] = asyncio.get_running_loop().create_future()
    work = asyncio.create_task(objects_of(response, 2, lambda tensors, info: pending.set_result(tensors)))
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


class Making:
    """An input that replicas make one after the other, because all but the last die."""

    def __init__(self) -> None:
        self.made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latest = "of the first replica"

    async def inputs(self) -> str:
        return self.latest

    async def finished(self) -> None:
        await asyncio.shield(self.made)

    def end(self, latest: str) -> None:
        self.latest = latest
        self.made.set_result(None)


async def test_a_call_may_end_before_its_inputs_are_said_to_be_made() -> None:
    making = Making()

    async def call(given: str) -> str:
        return given

    assert await with_pending(making.inputs, making.finished, call) == "of the first replica"


@pytest.mark.parametrize("notices", [True, False])
async def test_a_call_whose_inputs_are_made_again_is_made_again(notices: bool) -> None:
    """Also one that Ray would never end."""
    making = Making()
    calls: list[str] = []

    async def call(given: str) -> str:
        calls.append(given)
        if given == "of the second":
            return "answer"
        if notices:
            raise ActorDiedError
        await asyncio.Event().wait()
        raise AssertionError

    waiting = asyncio.create_task(with_pending(making.inputs, making.finished, call))
    await asyncio.sleep(0.01)
    making.end("of the second")
    assert await asyncio.wait_for(waiting, 5) == "answer"
    assert calls == ["of the first replica", "of the second"]


async def test_a_call_whose_inputs_are_as_they_were_keeps_its_error() -> None:
    making = Making()

    async def call(given: str) -> str:
        raise ValueError("of the call")

    waiting = asyncio.create_task(with_pending(making.inputs, making.finished, call))
    await asyncio.sleep(0.01)
    making.end(making.latest)
    with pytest.raises(ValueError, match="of the call"):
        await asyncio.wait_for(waiting, 5)


async def test_what_makes_the_inputs_fails_before_the_call_that_needs_them() -> None:
    making = Making()

    async def call(given: str) -> str:
        raise ValueError("of the call")

    waiting = asyncio.create_task(with_pending(making.inputs, making.finished, call))
    await asyncio.sleep(0.01)
    making.made.set_exception(ValueError("of the inputs"))
    with pytest.raises(ValueError, match="of the inputs"):
        await asyncio.wait_for(waiting, 5)


async def test_a_caller_that_leaves_ends_a_call_with_pending_inputs() -> None:
    making = Making()
    call: Any = Cancelled(by_ray=False)

    async def send(given: str) -> Any:
        return await objects_of(call, 2, ignore)

    task = asyncio.create_task(with_pending(making.inputs, making.finished, send))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert call.is_cancelled
    assert not making.made.done(), "others may need it"


def test_references_with_wrong_bytes_are_references_or_errors(ray_port: int) -> None:
    """Ray itself ends the process where an id in them has another length."""
    ref = ray.put("kept")
    packed, generator = pack_reference(ref), random.Random(1)
    for _ in range(500):
        parts = [bytearray(part) for part in packed]
        for _ in range(generator.randint(1, 3)):
            part = generator.choice(parts)
            place = generator.randrange(len(part))
            part[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
        with suppress(ValueError, DecodeError):
            unpack_reference([bytes(part) for part in parts])
    assert ray.get(unpack_reference(packed)) == "kept"


@pytest.mark.parametrize("part", ["node_id", "worker_id"])
@pytest.mark.parametrize("value", [b"", b"x" * 27, b"x" * 29])
def test_an_owner_with_an_id_of_another_length_is_an_error(ray_port: int, part: str, value: bytes) -> None:
    object_id, owner, state = pack_reference(ray.put("kept"))
    address = Address.FromString(owner)
    setattr(address, part, value)
    with pytest.raises(ValueError, match="an id of another length"):
        unpack_reference((object_id, address.SerializeToString(), state))
