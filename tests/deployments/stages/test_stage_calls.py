"""What a call of a stage does when Ray fails it: what is sent again, what is not, and what reaches the client."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.ray_internals.calls_ahead import results_of
from raylens.deployments.stages.engine_loop import EngineDiedError
from raylens.deployments.stages.stage_calls import StageCalls, StageError, StageFailedError, StageUnavailableError
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


class Cancelled:
    """A call that Ray cancels, as it does when a replica dies, or that never answers."""

    def __init__(self, *, by_ray: bool) -> None:
        self._by_ray = by_ray
        self.is_cancelled = False

    async def _fetch_future_result_async(self) -> Any:
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
        await calls.send("encode", lambda: results_of(unsent.pop()))
    assert [tags["reason"] for tags in recomputed.noted] == ["TaskCancelledError"] * 3
    assert all(one.is_cancelled for one in sent)


async def test_a_caller_that_is_cancelled_ends_with_its_call() -> None:
    calls, recomputed, _ = make_calls()
    call: Any = Cancelled(by_ray=False)
    task = asyncio.create_task(calls.send("encode", lambda: results_of(call)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert call.is_cancelled
    assert recomputed.noted == []
