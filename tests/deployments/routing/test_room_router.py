"""Routing by load on a real Ray Serve, and on made-up replicas."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from ray import ObjectRef, serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from raylens.deployments.cluster.ray_session import ray_session
from raylens.deployments.ray_internals.calls_ahead import results_of
from raylens.deployments.ray_internals.handles import route_on_this_loop
from raylens.deployments.routing.room_router import OldestFirstLock, room_routing
from tests.made_up_router import MAX_ONGOING, Router
from tests.replicas import stopped, worker_pids
from tests.waiting import wait_until

TIMEOUT = 30


# OldestFirstLock


async def test_turns_go_by_age_and_pass_over_the_cancelled() -> None:
    turns = OldestFirstLock()
    done: list[float] = []

    async def take(age: float) -> None:
        async with turns.held(age):
            done.append(age)
            await asyncio.sleep(0.001)

    async with turns.held(0):
        tasks = {age: asyncio.create_task(take(age)) for age in (5, 1, 4, 2, 3)}
        await asyncio.sleep(0.001)
        tasks[1].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0.001)
        assert done == []
    await asyncio.wait_for(asyncio.gather(tasks[2], tasks[4], tasks[5]), 5)
    assert done == [2, 4, 5]
    assert not turns.is_taken


async def test_a_turn_that_comes_with_the_cancellation_is_passed_on() -> None:
    turns = OldestFirstLock()

    async def take() -> None:
        async with turns.held(1):
            pass

    async with turns.held(0):
        first, second = asyncio.create_task(take()), asyncio.create_task(take())
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()
    assert not turns.is_taken


@pytest.mark.parametrize("leavers", [(1,), (1, 2), (1, 3), (1, 2, 3)])
async def test_who_leaves_in_the_moment_of_its_turn_ends_nobody_elses_call(leavers: tuple[int, ...]) -> None:
    """Its future is cancelled already, and its own coroutine does not know it yet."""
    turns = OldestFirstLock()
    done: list[float] = []

    async def take(age: float) -> None:
        async with turns.held(age):
            done.append(age)

    async with turns.held(0):
        tasks = {age: asyncio.create_task(take(age)) for age in (1, 2, 3)}
        await asyncio.sleep(0.001)
        for age in leavers:
            tasks[age].cancel()
    await asyncio.wait(tasks.values(), timeout=5)
    assert [age for age, task in tasks.items() if task.cancelled()] == list(leavers)
    assert done == [age for age in tasks if age not in leavers]
    assert not turns.is_taken


# The router alone: no Ray, its replicas are made up


@pytest.mark.parametrize("is_ahead", [False, True], ids=["sent", "sent ahead"])
@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["together", "after the reports"])
async def test_a_pair_of_calls_goes_to_two_resting_replicas(pause: float, is_ahead: bool) -> None:
    made_up = Router("ab")
    send = made_up.send_ahead if is_ahead else made_up.send
    for _ in range(20):
        await made_up.rest()
        first = await send()
        await asyncio.sleep(pause)  # a report comes that may not contain the first call
        second = await send()
        assert first is not second
        made_up.end(first)
        made_up.end(second)


async def test_a_report_that_comes_after_the_end_of_its_call_splits_pairs_too() -> None:
    for _ in range(20):
        made_up = Router("ab")
        await made_up.rest()
        busy = await made_up.send()
        made_up.end(busy)
        made_up.router.on_new_queue_len_info(busy.replica_id, 1)
        assert len({await made_up.send(), await made_up.send()}) == 2


async def test_a_pair_of_calls_goes_to_two_replicas_one_of_which_has_not_reported_for_long() -> None:
    made_up = Router("ab")
    await made_up.rest()
    made_up.router.on_new_queue_len_info(made_up.replicas["b"].replica_id, 0)
    assert len({await made_up.send(), await made_up.send()}) == 2


async def test_a_burst_of_calls_shares_the_reports_and_is_spread_evenly() -> None:
    made_up = Router("ab")
    await made_up.rest()
    sent = await asyncio.gather(*(made_up.send() for _ in range(6)))
    await asyncio.sleep(0.01)
    assert Counter(sent) == dict.fromkeys(made_up.replicas.values(), 3)
    assert [replica.num_probes for replica in sent[:2]] == [1, 1]


async def test_a_replica_without_a_report_delays_no_call_that_another_can_take() -> None:
    made_up = Router("ab")
    await made_up.rest()
    silent, other = made_up.replicas.values()
    silent.answers.clear()
    made_up.router.on_replica_actor_unavailable(silent.replica_id)
    for _ in range(MAX_ONGOING):
        assert await asyncio.wait_for(made_up.send(), 0.05) is other


async def test_calls_that_wait_go_before_new_ones_and_need_no_pause() -> None:
    made_up = Router()
    busy = [await made_up.send() for _ in range(3 * MAX_ONGOING)]
    order: list[int] = []

    async def send(number: int) -> None:
        replica = await made_up.send(created_at=number)
        order.append(number)
        made_up.end(replica)

    waiting = [asyncio.create_task(send(number)) for number in range(10)]
    await asyncio.sleep(0.05)
    made_up.end(busy[0])
    waiting.append(asyncio.create_task(send(10)))
    await asyncio.wait_for(asyncio.gather(*waiting), 5)  # the pause would be a minute
    assert order == list(range(11))


async def test_calls_find_the_only_replica_with_room() -> None:
    made_up = Router()
    busy = [await made_up.send() for _ in range(3 * MAX_ONGOING)]
    assert Counter(busy) == dict.fromkeys(made_up.replicas.values(), MAX_ONGOING)
    free = busy[0]
    for _ in range(3):
        made_up.end(free)
    assert [await made_up.send() for _ in range(3)] == [free] * 3
    # What another router's calls leave is noticed while there is room elsewhere.
    made_up.end(free)
    other = next(replica for replica in busy if replica != free)
    await asyncio.sleep(0.01)
    other.num_ongoing = 0
    for _ in range(20):
        made_up.end(await made_up.send())
        await asyncio.sleep(0.005)
    assert made_up.router.replica_queue_len_cache.get(other.replica_id) == 0


async def test_a_replica_whose_calls_bring_no_report_is_asked_now_and_then() -> None:
    made_up = Router("ab")
    await made_up.rest()
    for _ in range(10):
        made_up.end(await made_up.send())
        await asyncio.sleep(0.002)
    assert [replica.num_probes for replica in made_up.replicas.values()] == [1, 1]
    first, second = made_up.replicas.values()
    first.num_ongoing = MAX_ONGOING - 1  # another router's calls
    made_up.now += 1
    made_up.end(await made_up.send())
    await asyncio.sleep(0.01)
    assert first.num_probes == 2
    assert [await made_up.send() for _ in range(3)] == [second] * 3


async def test_calls_without_a_limit_go_past_those_that_wait_for_theirs() -> None:
    made_up = Router(slow=1)
    busy = [await made_up.send(method="slow") for _ in range(3)]
    waiting = asyncio.create_task(made_up.send(method="slow"))
    await asyncio.sleep(0.01)
    quick = await asyncio.wait_for(made_up.send(), 1)
    assert not waiting.done()
    made_up.end(quick)
    made_up.end(busy[0])
    assert await asyncio.wait_for(waiting, 5) is busy[0]


async def test_calls_without_a_question_wait_for_room_by_the_router_s_own_count() -> None:
    made_up = Router("ab")
    made_up.router.num_results = {"who": 2}
    sent = [await made_up.send_ahead() for _ in range(2 * MAX_ONGOING)]
    assert Counter(sent) == dict.fromkeys(made_up.replicas.values(), MAX_ONGOING)
    waiting = asyncio.create_task(made_up.send_ahead())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    made_up.end(sent[0])
    assert await asyncio.wait_for(waiting, 5) is sent[0]


async def test_an_error_of_the_choice_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Router()
    monkeypatch.setattr(made_up.router, "groups", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(made_up.send(), 5)


# On Ray Serve


class Worker:
    """Says which replica it is."""

    async def who(self, seconds: float = 0.0) -> str:
        await asyncio.sleep(seconds)
        replica_id: str = serve.get_replica_context().replica_id.unique_id
        return replica_id

    async def who_after(self, argument: str) -> str:
        return await self.who()

    async def two_after(self, argument: str) -> tuple[str, str]:
        return argument, "info"

    async def stream(self, num_items: int) -> AsyncGenerator[str]:
        for _ in range(num_items):
            yield await self.who(0.001)

    async def hold(self, folder: str) -> str:
        """Makes a file whose name starts with this replica's id. Stays busy until the folder has a file `release`."""
        replica_id = await self.who()
        Path(folder, f"{replica_id}.{uuid4().hex}").touch()
        while not Path(folder, "release").exists():
            await asyncio.sleep(0.05)
        return replica_id

    async def pid(self) -> int:
        return os.getpid()


class Caller:
    """Makes many calls of the worker in one request."""

    def __init__(self, worker: DeploymentHandle[Any], pair: DeploymentHandle[Any]) -> None:
        self._worker = worker
        route_on_this_loop(worker)

    async def fan_out(self, number: int) -> list[str]:
        return list(await asyncio.gather(*(self._worker.who.remote(0.01) for _ in range(number))))

    async def fan_out_streams(self, number: int) -> list[list[str]]:
        async def items() -> list[str]:
            return [item async for item in self._worker.options(stream=True).stream.remote(2)]

        return await asyncio.gather(*(items() for _ in range(number)))

    async def hold(self, folder: str) -> str:
        replica_id: str = await self._worker.hold.remote(folder)
        return replica_id

    async def overtake(self, folder: str) -> int:
        """Makes a call after calls whose argument comes once that call has ended. Returns how many had ended before."""
        argument = await self._worker.hold.remote(folder)._to_object_ref()
        waiting = [asyncio.ensure_future(self._after(argument)) for _ in range(4 * MAX_ONGOING)]
        await asyncio.sleep(0.5)
        await self._worker.who.remote()
        num_ended = sum(one.done() for one in waiting)
        Path(folder, "release").touch()
        await asyncio.gather(*waiting)
        return num_ended

    async def _after(self, argument: ObjectRef) -> str:
        replica_id: str = await self._worker.who_after.remote(argument)
        return replica_id

    async def send_ahead(self, folder: str) -> bool:
        """Makes a call whose argument comes once there are references to the call's results. Returns whether the
        results are those of the argument."""
        argument = await self._worker.hold.remote(folder)._to_object_ref()
        refs, info = await results_of(
            self._worker.two_after.remote(argument), lambda *refs: Path(folder, "release").touch()
        )
        return [await ref for ref in refs] == [await argument, info]


@pytest.fixture(scope="module")
def ray_serve() -> Iterator[None]:
    with ray_session(num_cpus=4):
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        yield
        serve.shutdown()


def worker_options(**options: Any) -> dict[str, Any]:
    return {
        "num_replicas": 3,
        "max_ongoing_requests": MAX_ONGOING,
        "ray_actor_options": {"num_cpus": 0.1},
        "health_check_period_s": 1.0,
        "graceful_shutdown_timeout_s": 5.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "request_router_config": room_routing(num_results={"who_after": 1, "two_after": 2}),
        **options,
    }


@pytest.fixture(scope="module")
def caller(ray_serve: None) -> DeploymentHandle[Any]:
    worker = serve.deployment(Worker, **worker_options()).bind()
    pair = serve.deployment(Worker, name="Pair", **worker_options(num_replicas=2)).bind()
    caller = serve.deployment(Caller, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
    return serve.run(caller.bind(worker, pair), name="router", route_prefix=None)


@pytest.fixture
def worker(caller: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    return serve.get_deployment_handle("Worker", "router")


def replicas_that_answer(handle: DeploymentHandle[Any]) -> set[str]:
    return {handle.who.remote().result(timeout_s=TIMEOUT) for _ in range(60)}


def test_calls_go_to_all_replicas(worker: DeploymentHandle[Any]) -> None:
    assert len(replicas_that_answer(worker)) == 3


def test_calls_avoid_the_busy_replica(caller: DeploymentHandle[Any], tmp_path: Path) -> None:
    pair = serve.get_deployment_handle("Pair", "router")
    with held(pair.hold.remote, 1, tmp_path):
        (busy,) = held_by(tmp_path)
        for _ in range(10):
            assert pair.who.remote().result(timeout_s=TIMEOUT) != busy
            time.sleep(0.2)  # the router hears of a call's end a little later than its caller


def held_by(folder: Path) -> Counter[str]:
    """How many calls of `hold` each replica has begun."""
    return Counter(path.stem for path in folder.iterdir() if path.name != "release")


@contextmanager
def held(
    call: Callable[[str], DeploymentResponse[Any]], number: int, folder: Path, *, pause: float = 0.0
) -> Iterator[None]:
    """Calls of `hold` that replicas have begun, and are busy with until the block is over. `call` makes one of them,
    and has the path of the `folder`."""
    calls = []
    try:
        for _ in range(number):
            calls.append(call(str(folder)))
            time.sleep(pause)
        wait_until(lambda: held_by(folder).total() == number)
        yield
    finally:
        (folder / "release").touch()
    for one in calls:
        one.result(timeout_s=TIMEOUT)


def test_a_call_that_waits_hears_of_room_that_another_router_s_calls_leave(
    caller: DeploymentHandle[Any], worker: DeploymentHandle[Any], tmp_path: Path
) -> None:
    with held(caller.hold.remote, 3 * MAX_ONGOING, tmp_path):
        late = worker.who.remote()
        with pytest.raises(TimeoutError):
            late.result(timeout_s=0.5)
    late.result(timeout_s=1.5)


def test_requests_side_by_side_make_many_calls_at_once(caller: DeploymentHandle[Any]) -> None:
    """The calls of one request share an internal id. There are more of them than the replicas take at a time."""
    calls = [caller.fan_out.remote(16) for _ in range(10)]
    streams = [caller.fan_out_streams.remote(16) for _ in range(3)]
    assert [len(call.result(timeout_s=TIMEOUT)) for call in calls] == [16] * 10
    for stream in streams:
        assert [len(set(items)) for items in stream.result(timeout_s=TIMEOUT)] == [1] * 16


def test_calls_that_wait_for_their_arguments_hold_up_no_other(caller: DeploymentHandle[Any], tmp_path: Path) -> None:
    """Neither do they take any room, however many there are."""
    assert caller.overtake.remote(str(tmp_path)).result(timeout_s=TIMEOUT) == 0


def test_the_results_of_a_call_that_waits_for_its_arguments_can_be_handed_on(
    caller: DeploymentHandle[Any], tmp_path: Path
) -> None:
    assert caller.send_ahead.remote(str(tmp_path)).result(timeout_s=TIMEOUT)


def test_a_call_that_waits_can_be_cancelled(worker: DeploymentHandle[Any], tmp_path: Path) -> None:
    with held(worker.hold.remote, 3 * MAX_ONGOING, tmp_path):
        waiting = [worker.who.remote() for _ in range(4)]
        time.sleep(0.3)
        for call in (waiting[0], waiting[2]):  # the one that asks for room, and one behind it
            call.cancel()
            with pytest.raises(RequestCancelledError):
                call.result(timeout_s=1.0)
    for call in (waiting[1], waiting[3]):
        call.result(timeout_s=TIMEOUT)


def test_no_call_counts_after_its_end(worker: DeploymentHandle[Any]) -> None:
    """However it ends, and whether or not its result is read."""
    argument = worker.who.remote(0.3)._to_object_ref_sync()
    cancelled = worker.who.remote(30.0)
    for dropped in (worker.who, worker.options(stream=True).stream, worker.options(_by_reference=False).who):
        dropped.remote(1)
    worker.who_after.remote(argument)
    worker.two_after.remote(argument)
    worker.who.remote("not a number of seconds")
    router = worker._router._asyncio_router.request_router
    time.sleep(1.0)
    wait_until(lambda: router._in_flight.total() == 1)
    cancelled.cancel()
    wait_until(lambda: router._in_flight.total() == 0)


@pytest.mark.slow
def test_calls_that_wait_go_to_replicas_that_start(ray_serve: None, tmp_path: Path) -> None:
    autoscaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=2,
        upscale_delay_s=0.2,
        metrics_interval_s=0.2,
        look_back_period_s=0.5,
    )
    options = worker_options(num_replicas=None, autoscaling_config=autoscaling)
    handle = serve.run(serve.deployment(Worker, **options).bind(), name="scaled", route_prefix=None)
    # More than one replica takes, so most of them wait until there are more.
    with held(handle.hold.remote, 3 * MAX_ONGOING, tmp_path):
        assert list(held_by(tmp_path).values()) == [MAX_ONGOING] * 3
    serve.delete("scaled", _blocking=False)


def test_a_replica_that_dies_loses_its_own_calls_only(worker: DeploymentHandle[Any]) -> None:
    before = replicas_that_answer(worker)
    pid = worker.pid.remote().result(timeout_s=TIMEOUT)
    running = [worker.who.remote(0.2) for _ in range(40)]
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    assert len(replicas_that_answer(worker)) >= 2  # answered, all of them
    assert sum(is_lost(call) for call in running) <= MAX_ONGOING
    wait_until(lambda: len(replicas_that_answer(worker) - before) == 1, seconds=TIMEOUT)
    wait_until(lambda: worker._router._asyncio_router.request_router._in_flight.total() == 0)


def test_a_dead_replica_gets_one_call_at_most_before_the_controller_hears_of_its_death(
    worker: DeploymentHandle[Any],
) -> None:
    pid = worker.pid.remote().result(timeout_s=TIMEOUT)
    with stopped(*worker_pids("ServeController")):
        os.kill(pid, signal.SIGKILL)
        lost = [is_lost(worker.who_after.remote("")) for _ in range(60)]
    assert sum(lost) <= 1
    wait_until(lambda: len(replicas_that_answer(worker)) == 3, seconds=TIMEOUT)


def is_lost(call: DeploymentResponse[Any]) -> bool:
    try:
        call.result(timeout_s=TIMEOUT)
    except RayError:
        return True
    return False
