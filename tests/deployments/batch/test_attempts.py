"""When an answer of a server is the answer of a batch's request."""

import pytest

from raylens.deployments.batch.attempts import Attempts


@pytest.mark.parametrize("status", [200, 400, 404, 413])
def test_an_answer_of_its_own_ends_the_attempts(status: int) -> None:
    assert Attempts().are_over(status, 0)


def test_a_request_waits_for_room_without_end() -> None:
    attempts = Attempts()
    assert not any(attempts.are_over(429, number) for number in range(1000))


def test_a_failure_is_tried_three_times() -> None:
    attempts = Attempts()
    assert [attempts.are_over(500, 0) for _ in range(3)] == [False, False, True]


def test_a_server_that_is_away_for_all_is_waited_for() -> None:
    attempts = Attempts()
    assert not any(attempts.are_over(503, 7) for _ in range(1000))


def test_a_server_that_is_away_for_this_request_alone_ends_the_attempts() -> None:
    attempts = Attempts()
    assert [attempts.are_over(503, number) for number in range(1, 21)] == [False] * 19 + [True]
