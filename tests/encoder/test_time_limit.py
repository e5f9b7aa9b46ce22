"""A call that takes too long is given up; the calls behind it run."""

import threading

import pytest

from raylens.encoder.time_limit import GivenUpError, TimeLimit


def test_results_and_errors_are_those_of_the_call() -> None:
    limit = TimeLimit(10)
    assert limit.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 / 0)
    assert limit.run(lambda: threading.current_thread().name) == "time-limit"
    assert limit.num_given_up == 0


def test_a_call_that_takes_too_long_is_given_up() -> None:
    limit, released = TimeLimit(0.2), threading.Event()
    with pytest.raises(GivenUpError, match=r"more than 0.2 s"):
        limit.run(released.wait)
    assert limit.num_given_up == 1
    # The call is still there, and in nobody's way.
    assert limit.run(lambda: "next") == "next"
    released.set()


def test_a_calls_own_timeout_is_an_error_like_any_other() -> None:
    def fail() -> None:
        raise TimeoutError("the call's own")

    limit = TimeLimit(10)
    with pytest.raises(TimeoutError, match="the call's own") as caught:
        limit.run(fail)
    assert not isinstance(caught.value, GivenUpError)
    assert limit.num_given_up == 0
