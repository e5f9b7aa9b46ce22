"""Cores that processes share, and processes that do one thing after the other."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.planning.cores import LOOP_SLICE_SECONDS, Machine, Process, event_loop
from raylens.planning.virtual_time import Clock, start

SECONDS = st.floats(0.001, 10)


def ends(count: int, work: list[tuple[float, int]], background: float = 0.0) -> list[float]:
    """Returns when each piece of work ends, of (seconds, niceness), if all begin at once."""
    clock = Clock()
    machine = Machine(clock, count, background)
    found = [0.0] * len(work)

    def at_end(index: int) -> Callable[[], None]:
        return lambda: found.__setitem__(index, clock.now)

    for index, (seconds, niceness) in enumerate(work):
        Process(machine, niceness).submit(seconds, at_end(index))
    clock.run()
    return found


def test_two_threads_on_one_core_take_turns() -> None:
    assert ends(1, [(1.0, 0), (2.0, 0)]) == pytest.approx([2.0, 3.0])


def test_no_thread_has_more_than_one_core() -> None:
    assert ends(4, [(1.0, 0), (2.0, 0)]) == pytest.approx([1.0, 2.0])


def test_a_nice_thread_gets_less_of_a_core_and_all_that_is_left() -> None:
    weight = 1.25**-10
    first, nice = ends(1, [(1.0, 0), (1.0, 10)])
    assert first == pytest.approx(1 + weight)
    assert nice == pytest.approx(2.0)


def test_a_thread_shares_its_last_core_while_the_other_one_is_taken() -> None:
    """The third thread meets the first on its core, though all three are equal; the second has a core to itself."""
    assert ends(2, [(1.0, 0), (3.0, 0), (1.0, 0)]) == pytest.approx([2.0, 3.0, 2.0])


def test_a_thread_whose_last_core_is_taken_goes_to_an_idle_one() -> None:
    clock = Clock()
    machine, done = Machine(clock, 2), list[float]()
    first, _, third = (Process(machine) for _ in range(3))  # the third was last where the first is
    for process in (first, third):
        process.submit(1.0, lambda: done.append(clock.now))
    clock.run()
    assert done == pytest.approx([1.0, 1.0])


def test_a_core_that_becomes_idle_takes_over_a_thread() -> None:
    assert ends(2, [(2.0, 0), (1.0, 0), (2.0, 0)]) == pytest.approx([2.5, 1.0, 2.5])


def test_what_others_take_is_missing() -> None:
    assert ends(2, [(1.0, 0), (1.0, 0)], background=1.0) == pytest.approx([2.0, 2.0])


@given(st.lists(st.tuples(SECONDS, st.integers(0, 19)), min_size=1, max_size=8), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_cores_lose_no_time_and_make_none(work: list[tuple[float, int]], count: int) -> None:
    total, longest = sum(seconds for seconds, _ in work), max(seconds for seconds, _ in work)
    last = max(ends(count, work))
    assert max(total / count, longest) <= last * (1 + 1e-6)
    assert last <= total * (1 + 1e-6)
    assert all(end >= seconds * (1 - 1e-6) for end, (seconds, _) in zip(ends(count, work), work, strict=True))


def test_a_process_does_one_thing_after_the_other() -> None:
    clock = Clock()
    process, done = Process(Machine(clock, None)), list[float]()
    for _ in range(3):
        process.submit(1.0, lambda: done.append(clock.now))
    clock.run()
    assert done == [1.0, 2.0, 3.0]
    assert process.busy_seconds == 3.0


def test_a_cost_is_asked_when_the_work_begins() -> None:
    clock = Clock()
    process, begun = Process(Machine(clock, None)), list[float]()

    def cost() -> float:
        begun.append(clock.now)
        return 1.0

    process.submit(2.0)
    process.submit(cost)
    clock.run()
    assert (begun, clock.now) == ([2.0], 3.0)


def test_what_work_without_cost_submits_goes_behind_what_waits() -> None:
    clock = Clock()
    process, order = Process(Machine(clock, None)), list[str]()
    process.submit(1.0, lambda: process.submit(0.0, lambda: order.append("later")))
    process.submit(0.0, lambda: order.append("earlier"))
    clock.run()
    assert order == ["earlier", "later"]


def test_an_event_loop_takes_turns() -> None:
    clock = Clock()
    process, done = event_loop(Machine(clock, None)), dict[str, float]()
    process.submit(10 * LOOP_SLICE_SECONDS, lambda: done.__setitem__("long", clock.now))
    process.submit(LOOP_SLICE_SECONDS, lambda: done.__setitem__("short", clock.now))
    clock.run()
    assert done == pytest.approx({"short": 2 * LOOP_SLICE_SECONDS, "long": 11 * LOOP_SLICE_SECONDS})


def test_what_is_behind_a_request_begins_when_the_request_has_passed() -> None:
    clock = Clock()
    process, done = Process(Machine(clock, None)), dict[str, float]()

    async def request() -> None:
        await process.pass_through(1.0, 0.25)
        done["passed"] = clock.now

    start(request())
    clock.run()
    assert (done, process.busy_seconds, clock.now) == ({"passed": 0.25}, 1.0, 1.0)
