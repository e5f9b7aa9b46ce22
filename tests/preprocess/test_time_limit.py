"""A thread that computes for too long gets an error; one that ends in time never does."""

import ctypes
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


def test_work_that_takes_too_long_ends() -> None:
    limit = TimeLimit(0.1)
    with ThreadPoolExecutor(1) as thread:

        def work() -> None:
            with limit:
                while True:
                    try:
                        compute(1)
                    except Exception:
                        continue

        with pytest.raises(TimeLimitError):
            thread.submit(work).result(timeout=30)
        # The same thread goes on with other work, which has a time of its own.
        assert thread.submit(compute, 0.3).result(timeout=30) is None


def test_waiting_takes_no_time() -> None:
    with TimeLimit(0.1):
        time.sleep(0.3)


def test_an_error_of_the_work_comes_as_it_is() -> None:
    limit = TimeLimit(0.1)
    with pytest.raises(KeyError), limit:
        raise KeyError
    compute(0.3)


@pytest.mark.long
def test_work_that_ends_at_the_limit_never_hits_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher has begun to raise the error when the block ends: the error still comes before the block is left."""
    py_object = ctypes.py_object

    def slow(error: type[BaseException]) -> "ctypes.py_object[type[BaseException]]":
        time.sleep(0.3)
        return py_object(error)

    monkeypatch.setattr(ctypes, "py_object", slow)
    limit = TimeLimit(0.001)

    def compute_until_the_watcher_raises() -> None:
        with limit:
            while limit._running:
                pass

    with pytest.raises(TimeLimitError):
        compute_until_the_watcher_raises()
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
