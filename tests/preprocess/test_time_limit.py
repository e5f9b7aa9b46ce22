"""A thread that computes for too long gets an error; one that ends in time never does."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raylens.preprocess import time_limit
from raylens.preprocess.time_limit import TimeLimit, TimeLimitError


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "_POLL_SECONDS", 0.05)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def work_without_end() -> None:
    while True:
        with contextlib.suppress(Exception):
            compute(1)


def test_work_that_takes_too_long_ends() -> None:
    limit = TimeLimit(0.1)
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(TimeLimitError):
            thread.submit(limit.run, work_without_end).result(timeout=30)
        # The same thread goes on with other work, which has a time of its own.
        assert thread.submit(compute, 0.3).result(timeout=30) is None


def test_an_error_that_python_drops_comes_again() -> None:
    """As it drops one that comes in a callback of the garbage collector."""

    def work() -> None:
        for _ in range(2):
            with contextlib.suppress(TimeLimitError):
                work_without_end()
        work_without_end()

    with pytest.raises(TimeLimitError):
        TimeLimit(0.1).run(work)


def test_results_are_those_of_the_work() -> None:
    assert TimeLimit(1).run(lambda: 3) == 3


def test_waiting_takes_no_time() -> None:
    TimeLimit(0.1).run(lambda: time.sleep(0.3))


def test_an_error_of_the_work_comes_as_it_is() -> None:
    limit = TimeLimit(0.1)
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 / 0)
    compute(0.3)


@pytest.mark.long
def test_work_that_ends_at_the_limit_never_hits_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work ends while the watcher is about to raise the error."""
    raise_in, begun = time_limit._raise_in, threading.Event()

    def slow(thread: int, error: type[BaseException] | None) -> None:
        if error is not None:
            begun.set()
            time.sleep(0.3)
        raise_in(thread, error)

    def work() -> str:
        while not begun.is_set():
            pass
        return "done"

    monkeypatch.setattr(time_limit, "_raise_in", slow)
    assert TimeLimit(0.001).run(work) == "done"
    compute(0.4)


def test_no_watcher_outlives_its_limit() -> None:
    def watchers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "time-limit"}

    before = watchers()
    limits = [TimeLimit(1) for _ in range(5)]
    own = watchers() - before
    assert len(own) == 5
    limits.clear()
    for thread in own:
        thread.join(10)
    assert own.isdisjoint(watchers())
