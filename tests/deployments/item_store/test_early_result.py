"""An early value stands in for a result until the result is there."""

import asyncio

import pytest

from raylens.deployments.item_store.early_result import Announce, EarlyResult


class Computation:
    """Announces a reference at once, unless `is_silent`, and returns the result, or fails, when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.failure: Exception | None = None
        self.is_silent = False
        self.num_computed = 0

    async def compute(self, announce: Announce[str]) -> int:
        self.num_computed += 1
        number = self.num_computed
        if not self.is_silent:
            announce(f"reference {number}")
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return number


def early_result(computation: Computation, known: list[str] | None = None) -> EarlyResult[str, int]:
    heard = [] if known is None else known
    return EarlyResult(computation.compute, lambda result: f"of result {result}", heard.append)


async def test_others_get_the_reference_before_the_result_and_the_result_after() -> None:
    computation, known = Computation(), list[str]()
    result = early_result(computation, known)
    assert await asyncio.wait_for(result.early(), 5) == "reference 1"
    assert result.result_or("early") == "early"
    computation.may_end.set()
    assert await result.result() == 1
    assert await result.early() == "reference 1", "the early value stays the same"
    assert (result.result_or("early"), known) == (1, ["reference 1"])


async def test_a_result_that_comes_without_a_reference_stands_for_one() -> None:
    computation, known = Computation(), list[str]()
    computation.is_silent = True
    result = early_result(computation, known)
    waiting = asyncio.create_task(result.early())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    computation.may_end.set()
    assert await asyncio.wait_for(waiting, 5) == "of result 1"
    await asyncio.sleep(0)
    assert known == ["of result 1"]


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_failure_reaches_who_waits_for_the_result(is_silent: bool) -> None:
    computation = Computation()
    computation.is_silent, computation.failure = is_silent, ValueError("a bug")
    result = early_result(computation)
    computation.may_end.set()
    with pytest.raises(ValueError, match="a bug"):
        await result.result()
    assert result.result_or("early") == "early"
    if is_silent:
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(result.early(), 5)


async def test_a_lost_result_is_computed_again() -> None:
    computation, known = Computation(), list[str]()
    computation.may_end.set()
    result = early_result(computation, known)
    assert await result.result() == 1
    result.start()
    assert await asyncio.wait_for(result.early(), 5) == "reference 2"
    assert await result.result() == 2
    assert known == ["reference 1", "reference 2"]


async def test_closing_cancels_the_computation_and_leaving_does_not() -> None:
    computation = Computation()
    result = early_result(computation)
    waiting = asyncio.create_task(result.result())
    await result.early()
    waiting.cancel()
    await asyncio.wait([waiting])
    computation.may_end.set()
    assert await result.result() == 1
    other = early_result(Computation())
    await other.aclose()
    with pytest.raises(asyncio.CancelledError):
        await other.result()
