"""Routing by key on a real Ray Serve, and the pure functions that it rests on."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import PendingRequest, ReplicaID

from raylens.deployments.cluster.ray_session import ray_session
from raylens.deployments.routing.replica_choice import Load, two_choices
from raylens.deployments.routing.room_router import (
    LoadBound,
    OldestFirstLock,
    RendezvousRouter,
    rank,
    rendezvous_routing,
    spill_order,
)
from tests.waiting import wait_until

TIMEOUT = 30
KEYS = [f"key-{number}" for number in range(40)]
MAX_ONGOING = 4

replica_names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
keys = st.text(max_size=20)


# The ranking


@given(keys, replica_names, st.randoms())
def test_the_order_of_the_replicas_does_not_matter(key: str, replicas: list[str], random: Any) -> None:
    ranked = rank(key, replicas)
    assert sorted(ranked) == sorted(replicas)
    random.shuffle(replicas)
    assert rank(key, replicas) == ranked


@given(keys, replica_names, st.data())
def test_without_a_replica_the_others_keep_their_order(key: str, replicas: list[str], data: Any) -> None:
    """So the keys of a replica that goes move to the second of their ranking, and no other key moves."""
    gone = data.draw(st.sampled_from(replicas))
    left = [replica for replica in replicas if replica != gone]
    assert rank(key, left) == [replica for replica in rank(key, replicas) if replica != gone]


@pytest.mark.parametrize("num_replicas", [2, 3, 10])
def test_keys_are_spread_evenly(num_replicas: int) -> None:
    replicas = [f"replica-{number}" for number in range(num_replicas)]
    ranks = [rank(str(key), replicas) for key in range(10_000)]
    fair = 10_000 / num_replicas
    for position in (0, -1):
        counts = Counter(ranked[position] for ranked in ranks)
        assert all(abs(counts[replica] - fair) < 0.12 * fair for replica in replicas), counts
    # The keys of one replica spread over all others when it goes.
    seconds = Counter(ranked[1] for ranked in ranks if ranked[0] == "replica-0")
    fair = seconds.total() / (num_replicas - 1)
    assert all(abs(seconds[replica] - fair) < 0.3 * fair for replica in replicas[1:]), seconds


def test_every_process_ranks_alike() -> None:
    replicas = [f"replica-{number}" for number in range(5)]
    code = "from raylens.deployments.routing.room_router import rank; "
    code += f"print([rank(key, {replicas}) for key in {KEYS}])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.strip() == str([rank(key, replicas) for key in KEYS])


def test_half_a_surrogate_pair_is_a_key() -> None:
    assert rank("\ud83d", ["a", "b"]) != []


# The order of spilling

bounds = st.builds(LoadBound, st.floats(1, 4), st.integers(1, 10))


@given(bounds, st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_some_replica_is_always_within_the_bound(bound: LoadBound, loads: list[int]) -> None:
    assert min(loads) < bound.of(loads)


@given(keys, bounds, st.dictionaries(st.text(min_size=1, max_size=8), st.none() | st.integers(0, 20), min_size=1))
def test_a_call_goes_to_the_first_with_room_within_the_bound(
    key: str, bound: LoadBound, ongoing: dict[str, int | None]
) -> None:
    loads = {replica: Load(number, limit=10) for replica, number in ongoing.items()}
    ranked = rank(key, loads)
    order = spill_order(ranked, loads, bound)
    assert sorted(replica for group in order for replica in group) == sorted(loads)
    limit = bound.of([number for number in ongoing.values() if number is not None])
    within = [replica for replica in ranked if (ongoing[replica] or 0) < min(limit, 10)]
    over = [replica for replica in ranked if limit <= (ongoing[replica] or 0) < 10]
    assert order[: len(within) + len(over)] == [[replica] for replica in within + over]


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.none() | st.integers(0, 20)))
def test_without_a_key_two_replicas_are_chosen_between(ongoing: dict[str, int | None]) -> None:
    loads = {replica: Load(number, limit=10) for replica, number in ongoing.items()}
    order = two_choices(list(ongoing), loads)
    with_room = [replica for replica, number in ongoing.items() if number is None or number < 10]
    full = [replica for replica in ongoing if replica not in with_room]
    assert order == [group for group in (with_room[:2], with_room[2:], full) if group]


def test_a_bound_that_no_replica_could_keep_is_refused() -> None:
    for factor, minimum in [(0.9, 4), (float("nan"), 4), (1.25, 0)]:
        with pytest.raises(ValueError, match="must be"):
            rendezvous_routing(balance_factor=factor, min_bound=minimum)


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


class Replica:
    """As much of Ray's RunningReplica as the router uses."""

    max_ongoing_requests = MAX_ONGOING

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("Worker"))
        self.num_ongoing = 0
        self.num_probes = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        await self.answers.wait()
        await asyncio.sleep(0.001)
        return self.num_ongoing


class Router:
    """A RendezvousRouter over three made-up replicas; `send` does what Ray does with a call."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.router = RendezvousRouter(
            DeploymentID("Worker"),
            DeploymentHandleSource.UNKNOWN,
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: self.now,
            initial_backoff_s=60,
            max_backoff_s=60,
        )
        self.router.initialize_state(min_bound=2, limits=limits)
        self.replicas = {name: Replica(name) for name in "abc"}
        self.router.update_replicas(list(self.replicas.values()))

    async def send(self, key: str, created_at: float = 0.0, method: str = "who") -> Replica:
        metadata = SimpleNamespace(session_id=key, call_method=method)
        request = PendingRequest([], {}, metadata, created_at=created_at)
        replica: Replica = await self.router._choose_replica_for_request(request)
        replica.num_ongoing += 1
        assert replica.num_ongoing <= MAX_ONGOING
        self.router.on_send_request(replica.replica_id)
        return replica

    def end(self, replica: Replica) -> None:
        replica.num_ongoing -= 1
        # In Ray's order.
        self.router.on_request_completed(replica.replica_id, "")
        self.router.decrement_queue_len_cache(replica.replica_id)

    async def forget_loads(self) -> None:
        """Lets the time pass after which a load that was told is too old."""
        await asyncio.sleep(0.01)
        self.now += 60
        for replica in self.replicas.values():
            replica.num_probes = 0


async def test_a_burst_of_calls_shares_the_answers_of_the_replicas_and_keeps_the_bound() -> None:
    made_up = Router()
    await made_up.forget_loads()
    sent = await asyncio.gather(*(made_up.send("hot") for _ in range(6)))
    # Twice for one that is passed over.
    assert all(1 <= replica.num_probes <= 2 for replica in made_up.replicas.values())
    first, second, third = (made_up.replicas[name] for name in rank("hot", "abc"))
    # The bound is 2 up to the fifth call, then ceil(1.25 * 6 / 3) = 3.
    assert sent == [first, first, second, second, first, second]
    assert third.num_ongoing == 0


async def test_a_replica_that_does_not_answer_delays_its_own_keys_only() -> None:
    made_up = Router()
    await made_up.forget_loads()
    ranked = rank("its key", "abc")
    made_up.replicas[ranked[0]].answers.clear()
    other = next(key for key in KEYS if rank(key, "abc")[0] == ranked[1])
    delayed = [asyncio.create_task(made_up.send("its key")) for _ in range(2)]
    await asyncio.sleep(0.01)
    await asyncio.wait_for(made_up.send(other), 0.05)
    assert not any(call.done() for call in delayed)
    answers = await asyncio.wait_for(asyncio.gather(*delayed), 5)
    assert [replica.replica_id.unique_id for replica in answers] == [ranked[1], ranked[2]]


async def test_calls_that_wait_go_before_new_ones_and_need_no_pause() -> None:
    made_up = Router()
    busy = [await made_up.send("") for _ in range(3 * MAX_ONGOING)]
    order: list[int] = []

    async def send(number: int) -> None:
        replica = await made_up.send("key", created_at=number)
        order.append(number)
        made_up.end(replica)

    waiting = [asyncio.create_task(send(number)) for number in range(10)]
    await asyncio.sleep(0.05)
    made_up.end(busy[0])
    waiting.append(asyncio.create_task(send(10)))
    await asyncio.wait_for(asyncio.gather(*waiting), 5)  # the pause would be a minute
    assert order == list(range(11))


async def test_calls_without_a_key_find_the_only_replica_with_room() -> None:
    made_up = Router()
    busy = [await made_up.send("") for _ in range(3 * MAX_ONGOING)]
    assert Counter(busy) == dict.fromkeys(made_up.replicas.values(), MAX_ONGOING)
    free = busy[0]
    for _ in range(3):
        made_up.end(free)
    assert [await made_up.send("") for _ in range(3)] == [free] * 3
    # What another router's calls leave is noticed while there is room elsewhere.
    made_up.end(free)
    other = next(replica for replica in busy if replica != free)
    other.num_ongoing = 0
    answers = []
    for _ in range(20):
        answers.append(await made_up.send(""))
        made_up.end(answers[-1])
        await asyncio.sleep(0.005)
    assert other in answers


async def test_a_replica_whose_calls_bring_no_news_is_asked_now_and_then() -> None:
    made_up = Router()
    first, second, _ = (made_up.replicas[name] for name in rank("key", "abc"))
    made_up.end(await made_up.send("key"))
    await made_up.forget_loads()
    for _ in range(10):
        made_up.end(await made_up.send("key"))
        await asyncio.sleep(0.002)
    assert first.num_probes == 1
    first.num_ongoing = MAX_ONGOING - 1  # another router's calls
    made_up.now += 1
    assert await made_up.send("key") is first
    await asyncio.sleep(0.01)
    assert first.num_probes == 2
    assert await made_up.send("key") is second


async def test_calls_without_a_limit_go_past_those_that_wait_for_theirs() -> None:
    made_up = Router(slow=1)
    busy = [await made_up.send("", method="slow") for _ in range(3)]
    waiting = asyncio.create_task(made_up.send("", method="slow"))
    await asyncio.sleep(0.01)
    quick = await asyncio.wait_for(made_up.send(""), 1)
    assert not waiting.done()
    made_up.end(quick)
    made_up.end(busy[0])
    assert await asyncio.wait_for(waiting, 5) is busy[0]


async def test_an_error_of_the_choice_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Router()
    monkeypatch.setattr(made_up.router, "choose_replicas", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(made_up.send("key"), 5)


# On Ray Serve


class Worker:
    """Says which replica it is."""

    async def who(self, seconds: float = 0.0) -> str:
        await asyncio.sleep(seconds)
        replica_id: str = serve.get_replica_context().replica_id.unique_id
        return replica_id

    async def who_after(self, argument: str) -> str:
        return await self.who()

    async def stream_after(self, argument: str) -> AsyncGenerator[str]:
        yield argument

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

    def __init__(self, worker: DeploymentHandle[Any], bounded: DeploymentHandle[Any]) -> None:
        self._worker = worker

    async def fan_out(self, keys: list[str], seconds: float = 0.01) -> list[str]:
        calls = [self._worker.options(session_id=key).who.remote(seconds) for key in keys]
        return list(await asyncio.gather(*calls))

    async def hold(self, key: str, folder: str) -> str:
        replica_id: str = await self._worker.options(session_id=key).hold.remote(folder)
        return replica_id

    async def overtake(self, seconds: float) -> tuple[float, float]:
        """Makes a call after calls whose argument takes `seconds` to come. Returns when it and they ended."""
        started = time.monotonic()
        argument = await self._worker.options(session_id="").who.remote(seconds)._to_object_ref()
        worker = self._worker.options(session_id="one")
        waiting = asyncio.gather(*(worker.who_after.remote(argument) for _ in range(4 * MAX_ONGOING)))
        await asyncio.sleep(seconds / 4)
        await worker.who.remote()
        overtaken = time.monotonic() - started
        await waiting
        return overtaken, time.monotonic() - started

    async def send_ahead(self, seconds: float) -> tuple[float, float]:
        """Makes a call whose argument takes `seconds` to come. Returns when there were references to the call's
        results, and when these were there."""
        started = time.monotonic()
        argument = await self._worker.who.remote(seconds)._to_object_ref()
        stream = await self._worker.options(stream=True).stream_after.remote(argument)._to_object_ref_gen()
        (result,) = stream._get_next_ref_n(1)
        referred = time.monotonic() - started
        assert await result == await argument
        return referred, time.monotonic() - started

    async def fan_out_streams(self, keys: list[str]) -> list[list[str]]:
        async def items(key: str) -> list[str]:
            stream = self._worker.options(session_id=key, stream=True).stream
            return [item async for item in stream.remote(2)]

        return await asyncio.gather(*(items(key) for key in keys))


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
        "request_router_config": rendezvous_routing(),
        **options,
    }


@pytest.fixture(scope="module")
def caller(ray_serve: None) -> DeploymentHandle[Any]:
    worker = serve.deployment(Worker, **worker_options()).bind()
    routing = rendezvous_routing(balance_factor=1.5, min_bound=2)
    options = worker_options(num_replicas=2, max_ongoing_requests=100, request_router_config=routing)
    bounded = serve.deployment(Worker, name="Bounded", **options).bind()
    caller = serve.deployment(Caller, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
    return serve.run(caller.bind(worker, bounded), name="router", route_prefix=None)


@pytest.fixture
def worker(caller: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    return serve.get_deployment_handle("Worker", "router")


def who(handle: DeploymentHandle[Any], key: str) -> str:
    answer: str = handle.options(session_id=key).who.remote().result(timeout_s=TIMEOUT)
    return answer


def placement(handle: DeploymentHandle[Any]) -> dict[str, str]:
    return {key: who(handle, key) for key in KEYS}


def placement_on(handle: DeploymentHandle[Any], num_replicas: int) -> dict[str, str]:
    """Which replica answers each key, once that many do, and did already when the first key was asked."""
    deadline = time.monotonic() + TIMEOUT
    before, placed = None, placement(handle)
    while placed != before or len(set(placed.values())) != num_replicas:
        assert time.monotonic() < deadline, f"{Counter(placed.values())} for {num_replicas} replicas"
        time.sleep(0.1)
        before, placed = placed, placement(handle)
    return placed


def expected(replicas: Iterable[str]) -> dict[str, str]:
    ids = set(replicas)
    return {key: rank(key, ids)[0] for key in KEYS}


def test_equal_keys_go_to_one_replica(worker: DeploymentHandle[Any]) -> None:
    assert len({who(worker, "a key") for _ in range(60)}) == 1


def test_keys_are_spread_over_the_replicas_by_their_ranking(worker: DeploymentHandle[Any]) -> None:
    placed = placement_on(worker, 3)
    assert placed == expected(placed.values())


@pytest.mark.parametrize("by_reference", [True, False], ids=["actor", "grpc"])
def test_streams_go_by_key_too(worker: DeploymentHandle[Any], by_reference: bool) -> None:
    home = expected(placement_on(worker, 3).values())
    for key in KEYS[:10]:
        stream = worker.options(session_id=key, stream=True, _by_reference=by_reference).stream
        assert list(stream.remote(3)) == [home[key]] * 3


def test_calls_without_a_key_go_anywhere(worker: DeploymentHandle[Any]) -> None:
    assert len({worker.who.remote().result(timeout_s=TIMEOUT) for _ in range(60)}) == 3


def test_calls_without_a_key_avoid_the_busy_replica(worker: DeploymentHandle[Any], tmp_path: Path) -> None:
    home = who(worker, "busy")
    with held(worker.options(session_id="busy").hold.remote, MAX_ONGOING - 1, tmp_path):
        assert held_by(tmp_path) == {home: MAX_ONGOING - 1}
        assert home not in {worker.who.remote().result(timeout_s=TIMEOUT) for _ in range(20)}


def test_a_full_replica_s_calls_spill_to_the_next(worker: DeploymentHandle[Any], tmp_path: Path) -> None:
    ranked = rank("hot", set(placement_on(worker, 3).values()))
    time.sleep(0.1)  # the router hears of a call's end a little later than its caller
    with held(worker.options(session_id="hot").hold.remote, 2 * MAX_ONGOING + 1, tmp_path):
        counts = held_by(tmp_path)
    assert [counts[replica] for replica in ranked] == [MAX_ONGOING, MAX_ONGOING, 1]


def test_a_replica_that_was_full_gets_its_calls_back(
    caller: DeploymentHandle[Any], worker: DeploymentHandle[Any], tmp_path: Path
) -> None:
    """Another router's calls fill it, so only the replica itself knows when they end."""
    home = rank("hot", set(placement_on(worker, 3).values()))[0]
    others: list[DeploymentResponse[Any]] = []
    # A call that has just ended may still count, so one of these calls may go to another replica.
    while held_by(tmp_path)[home] < MAX_ONGOING:
        others.append(caller.hold.remote("hot", str(tmp_path)))
        wait_until(lambda: held_by(tmp_path).total() == len(others))
    assert who(worker, "hot") != home
    (tmp_path / "release").touch()
    assert Counter(call.result(timeout_s=TIMEOUT) for call in others)[home] == MAX_ONGOING
    wait_until(lambda: who(worker, "hot") == home)


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


def test_one_key_cannot_overload_a_replica_that_takes_more(caller: DeploymentHandle[Any], tmp_path: Path) -> None:
    handle = serve.get_deployment_handle("Bounded", "router")
    first, second = rank("hot", set(placement_on(handle, 2).values()))
    # With a pause, because Ray's count of a replica's calls lags behind a burst.
    with held(handle.options(session_id="hot").hold.remote, 12, tmp_path, pause=0.03):
        counts = held_by(tmp_path)
    # The last call may go to the first replica as long as that has less than 1.5 * 12 / 2 = 9.
    assert (counts[first], counts[second]) == (9, 3)


def test_a_call_that_waits_hears_of_room_that_another_router_s_calls_leave(
    caller: DeploymentHandle[Any], worker: DeploymentHandle[Any], tmp_path: Path
) -> None:
    with held(partial(caller.hold.remote, ""), 3 * MAX_ONGOING, tmp_path):
        late = worker.options(session_id="late").who.remote()
        with pytest.raises(TimeoutError):
            late.result(timeout_s=0.5)
    late.result(timeout_s=1.5)


@pytest.mark.parametrize("keys", [KEYS[:16], ["one"] * 16, [""] * 16, (KEYS[:4] * 4)], ids=["all", "one", "no", "four"])
def test_one_request_may_make_many_calls_at_once(caller: DeploymentHandle[Any], keys: list[str]) -> None:
    """They share an internal request id, and there are more of them than the replicas take at a time."""
    for _ in range(3):
        answers = caller.fan_out.remote(keys).result(timeout_s=TIMEOUT)
        assert len(answers) == 16
        streams = caller.fan_out_streams.remote(keys).result(timeout_s=TIMEOUT)
        assert [len(set(items)) for items in streams] == [1] * 16


def test_requests_side_by_side_make_many_calls_at_once(caller: DeploymentHandle[Any]) -> None:
    calls = [caller.fan_out.remote(KEYS[:16]) for _ in range(10)]
    assert [len(call.result(timeout_s=TIMEOUT)) for call in calls] == [16] * 10


def test_calls_that_wait_for_their_arguments_hold_up_no_other(caller: DeploymentHandle[Any]) -> None:
    """Neither do they take any room, however many there are."""
    overtaking, waiting = caller.overtake.remote(2.0).result(timeout_s=TIMEOUT)
    assert overtaking < 1.5
    assert waiting >= 2.0


def test_the_results_of_a_call_that_waits_for_its_arguments_can_be_handed_on(caller: DeploymentHandle[Any]) -> None:
    referred, ended = caller.send_ahead.remote(2.0).result(timeout_s=TIMEOUT)
    assert referred < 1.0
    assert ended >= 2.0


def test_a_call_that_waits_can_be_cancelled(worker: DeploymentHandle[Any], tmp_path: Path) -> None:
    with held(worker.hold.remote, 3 * MAX_ONGOING, tmp_path):
        waiting = [worker.options(session_id="late").who.remote() for _ in range(4)]
        time.sleep(0.3)
        for call in (waiting[0], waiting[2]):  # the one that asks for room, and one behind it
            call.cancel()
            with pytest.raises(RequestCancelledError):
                call.result(timeout_s=1.0)
    for call in (waiting[1], waiting[3]):
        call.result(timeout_s=TIMEOUT)


def test_replicas_that_come_and_go_move_only_their_keys(ray_serve: None, tmp_path: Path) -> None:
    autoscaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=2,
        upscale_delay_s=0.2,
        downscale_delay_s=4.0,
        metrics_interval_s=0.2,
        look_back_period_s=0.5,
    )
    options = worker_options(num_replicas=None, autoscaling_config=autoscaling)
    handle = serve.run(serve.deployment(Worker, **options).bind(), name="scaled", route_prefix=None)
    (first,) = set(placement_on(handle, 1).values())
    # More than one replica takes, so most of them wait until there are more.
    load = [handle.hold.remote(str(tmp_path)) for _ in range(30)]
    wait_until(lambda: len(held_by(tmp_path)) == 3, seconds=TIMEOUT)
    (tmp_path / "release").touch()
    answers = {call.result(timeout_s=TIMEOUT) for call in load}
    many = placement_on(handle, 3)
    assert many == expected(many.values())
    assert answers == set(many.values())
    assert first in answers
    # Without the load two replicas go, and no call is lost on the way.
    placement_on(handle, 1)
    serve.delete("scaled", _blocking=False)


def test_a_replica_that_dies_loses_its_keys_only(worker: DeploymentHandle[Any]) -> None:
    before = placement_on(worker, 3)
    victim = before[KEYS[0]]
    pid = worker.options(session_id=KEYS[0]).pid.remote().result(timeout_s=TIMEOUT)
    running = [worker.options(session_id=key).who.remote(0.2) for key in KEYS]
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    placement(worker)  # answered, all of them
    assert sum(is_lost(call) for call in running) <= MAX_ONGOING
    after = placement(worker)
    survivors = set(before.values()) - {victim}
    new = set(after.values()) - survivors
    assert victim not in new
    assert all(after[key] in {rank(key, survivors)[0], *new} for key in KEYS)
    placement_on(worker, 3)


def is_lost(call: DeploymentResponse[Any]) -> bool:
    try:
        call.result(timeout_s=TIMEOUT)
    except RayError:
        return True
    return False
