"""The thread between asyncio and an engine, with an engine that only counts."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import pytest

from raylens.deployments.stages.engine_loop import SWITCH_SECONDS, EngineDiedError, EngineLoop
from tests.waiting import until


@dataclass
class Count:
    request_id: str
    value: int


class CountingEngine:
    """Gives every request 1, 2, 3, ... one a step."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failure: Exception | None = None
        self.may_step = threading.Event()
        self.may_step.set()

    def add(self, request_id: str) -> None:
        if request_id.startswith("refused"):
            raise ValueError("refused")
        self.counts[request_id] = 0

    def step(self) -> list[Count]:
        time.sleep(0.001)
        self.may_step.wait()
        if self.failure is not None:
            raise self.failure
        for request_id in self.counts:
            self.counts[request_id] += 1
        return [Count(request_id, value) for request_id, value in self.counts.items()]

    def abort(self, request_id: str) -> None:
        self.counts.pop(request_id, None)

    @property
    def is_idle(self) -> bool:
        return not self.counts


_MADE: list[tuple[CountingEngine, EngineLoop[Count]]] = []


def make(step_timeout_s: float = 10) -> tuple[CountingEngine, EngineLoop[Count]]:
    engine = CountingEngine()
    _MADE.append((engine, EngineLoop(engine, name="test", step_timeout_s=step_timeout_s)))
    return _MADE[-1]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    while _MADE:
        engine, loop = _MADE.pop()
        engine.may_step.set()
        assert loop.close()


async def count_to(engine: CountingEngine, loop: EngineLoop[Count], request_id: str, end: int) -> list[int]:
    values: list[int] = []

    def receive(outputs: list[Count]) -> bool:
        values.extend(output.value for output in outputs)
        return len(values) >= end

    await loop.run(request_id, engine.add, receive)
    return values


async def settled(engine: CountingEngine) -> None:
    await until(lambda: not engine.counts)


async def test_each_request_gets_its_own_outputs_in_order() -> None:
    engine, loop = make()
    results = await asyncio.gather(*(count_to(engine, loop, str(i), 20) for i in range(5)))
    assert all(values == list(range(1, len(values) + 1)) for values in results)
    await settled(engine)


async def test_outputs_that_are_ready_together_come_together() -> None:
    engine, loop = make()
    sizes: list[int] = []

    def receive(outputs: list[Count]) -> bool:
        sizes.append(len(outputs))
        time.sleep(0.05 if len(sizes) == 1 else 0)  # the caller is busy, the engine goes on
        return len(sizes) == 2

    await loop.run("a", engine.add, receive)
    assert sizes[0] == 1
    assert sizes[1] > 1


async def test_all_requests_get_the_outputs_of_a_step_at_once_and_without_a_task() -> None:
    engine, loop = make()
    engine.may_step.clear()
    before = asyncio.create_task(count_to(engine, loop, "before", 1))
    await until(lambda: bool(engine.counts))
    received: list[str] = []
    at_once: list[str] = []

    def receive(outputs: list[Count]) -> bool:
        assert asyncio.current_task() is None
        if not received:
            asyncio.get_running_loop().call_soon(lambda: at_once.extend(received))
        received.append(outputs[0].request_id.split("#")[0])
        return True

    calls = [asyncio.create_task(loop.run(name, engine.add, receive)) for name in "abcde"]
    await asyncio.sleep(0.01)  # all of them wait for the end of the step
    engine.may_step.set()
    await asyncio.gather(before, *calls)
    assert at_once == list("abcde")


async def test_outputs_are_received_in_the_callers_context() -> None:
    engine, loop = make()
    own: ContextVar[str] = ContextVar("own")
    received: dict[str, str] = {}

    async def call(name: str) -> None:
        def receive(_: list[Count]) -> bool:
            received[name] = own.get()
            return True

        own.set(name)
        await loop.run(name, engine.add, receive)

    await asyncio.gather(call("a"), call("b"))
    assert received == {"a": "a", "b": "b"}


async def test_a_receiver_that_fails_ends_its_request_alone() -> None:
    engine, loop = make()
    other = asyncio.create_task(count_to(engine, loop, "other", 50))

    def fail(_: list[Count]) -> bool:
        raise ValueError("cannot be sent")

    with pytest.raises(ValueError, match="cannot be sent"):
        await loop.run("a", engine.add, fail)
    assert len(await other) >= 50
    await settled(engine)


async def test_nothing_is_received_after_the_last_output() -> None:
    engine, loop = make()
    num_received = 0

    def receive(_: list[Count]) -> bool:
        nonlocal num_received
        num_received += 1
        time.sleep(0.05)  # the engine goes on, and its outputs are there before the caller runs again
        return True

    await loop.run("a", engine.add, receive)
    assert num_received == 1


async def test_the_engines_thread_gets_the_interpreter_long_before_a_step_would_be_over() -> None:
    sys.setswitchinterval(0.005)
    make()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert SWITCH_SECONDS < 0.001


async def test_a_request_may_be_sent_again_while_its_first_try_ends() -> None:
    engine, loop = make()
    results = await asyncio.gather(*(count_to(engine, loop, "same", 20) for _ in range(3)))
    assert all(values == list(range(1, len(values) + 1)) for values in results)
    await settled(engine)


async def test_the_end_of_a_request_aborts_it() -> None:
    engine, loop = make()
    await count_to(engine, loop, "a", 1)
    await settled(engine)


async def test_a_cancelled_caller_aborts_its_request() -> None:
    engine, loop = make()
    task = asyncio.create_task(count_to(engine, loop, "a", 10**9))
    await until(lambda: bool(engine.counts))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(engine)


async def test_a_refused_request_ends_alone() -> None:
    engine, loop = make()
    other = asyncio.create_task(count_to(engine, loop, "a", 50))
    with pytest.raises(ValueError, match="refused"):
        await count_to(engine, loop, "refused", 1)
    assert len(await other) >= 50


async def test_what_comes_later_reaches_the_engine_on_its_own_thread() -> None:
    engine, loop = make()
    engine.may_step.clear()
    threads: list[tuple[str, str]] = []

    async def addition() -> Callable[[str], None]:
        await asyncio.sleep(0.01)
        return lambda request_id: threads.append((request_id.split("#")[0], threading.current_thread().name))

    call = asyncio.create_task(loop.run("a", engine.add, lambda _: len(threads) == 2, [addition, addition]))
    await asyncio.sleep(0.05)
    engine.may_step.set()
    await call
    assert threads == [("a", "test")] * 2


@pytest.mark.parametrize("fails_in_engine", [False, True])
async def test_what_comes_later_and_fails_ends_its_request_alone(fails_in_engine: bool) -> None:
    engine, loop = make()
    other = asyncio.create_task(count_to(engine, loop, "other", 50))

    def fail(*_: str) -> None:
        raise ValueError("of a wrong shape")

    async def addition() -> Callable[[str], None]:
        if not fails_in_engine:
            fail()
        return fail

    with pytest.raises(ValueError, match="wrong shape"):
        await loop.run("a", engine.add, lambda _: False, [addition])
    assert len(await other) >= 50
    await settled(engine)


async def test_nobody_waits_for_what_comes_after_the_end() -> None:
    engine, loop = make()
    cancelled = asyncio.Event()

    async def addition() -> Callable[[str], None]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    await loop.run("a", engine.add, lambda _: True, [addition])
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_dead_engine_ends_every_request_and_fails_its_health() -> None:
    engine, loop = make()
    loop.check_health()
    task = asyncio.create_task(count_to(engine, loop, "a", 10**9))
    await until(lambda: bool(engine.counts))
    engine.failure = RuntimeError("broken")
    with pytest.raises(EngineDiedError):
        await task
    with pytest.raises(EngineDiedError, match="stopped"):
        loop.check_health()
    with pytest.raises(EngineDiedError):
        await count_to(engine, loop, "b", 1)


@pytest.mark.long
async def test_a_hanging_step_fails_the_health_and_idling_does_not() -> None:
    engine, loop = make(step_timeout_s=2)
    await asyncio.sleep(3)
    loop.check_health()
    engine.may_step.clear()
    task = asyncio.create_task(count_to(engine, loop, "a", 1))
    await until(lambda: loop.heartbeat_age > 2)
    with pytest.raises(EngineDiedError, match="no step ended"):
        loop.check_health()
    engine.may_step.set()
    await task


async def test_a_failure_from_outside_ends_every_request_the_thread_and_the_health() -> None:
    engine = CountingEngine()
    loop: EngineLoop[Count] = EngineLoop(engine, name="of its own", step_timeout_s=10)
    task = asyncio.create_task(count_to(engine, loop, "a", 10**9))
    await until(lambda: bool(engine.counts))
    threading.Thread(target=loop.fail, args=(RuntimeError("a rank is gone"),)).start()
    with pytest.raises(EngineDiedError):
        await task
    with pytest.raises(EngineDiedError, match="stopped") as caught:
        loop.check_health()
    assert str(caught.value.__cause__) == "a rank is gone"
    await until(lambda: "of its own" not in {thread.name for thread in threading.enumerate()})


async def test_a_step_in_work_ends_before_a_loop_is_closed() -> None:
    engine, loop = make()
    task = asyncio.create_task(count_to(engine, loop, "a", 10**9))
    await until(lambda: bool(engine.counts))
    assert loop.close()
    counts = dict(engine.counts)
    time.sleep(0.05)
    assert engine.counts == counts
    task.cancel()


async def test_a_loop_whose_step_hangs_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.deployments.stages.engine_loop._CLOSE_SECONDS", 0.1)
    engine, loop = make()
    engine.may_step.clear()
    task = asyncio.create_task(count_to(engine, loop, "a", 10**9))
    await until(lambda: bool(engine.counts))
    assert not loop.close()
    task.cancel()
    engine.may_step.set()
