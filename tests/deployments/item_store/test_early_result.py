"""What others learn of a result before it is there."""

import asyncio

import pytest

from raylens.deployments.item_store.early_result import Announce, InTheMaking


class Maker:
    """Announces a reference at once, unless `is_silent`, and returns the result, or fails, when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.failure: Exception | None = None
        self.is_silent = False
        self.num_made = 0

    async def make(self, announce: Announce[str]) -> int:
        self.num_made += 1
        number = self.num_made
        if not self.is_silent:
            announce(f"reference {number}")
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return number


def making(maker: Maker, known: list[str] | None = None) -> InTheMaking[str, int]:
    heard = [] if known is None else known
    return InTheMaking(maker.make, lambda result: f"of result {result}", heard.append)


async def test_others_get_the_reference_before_the_result_and_the_result_after() -> None:
    maker, known = Maker(), list[str]()
    result = making(maker, known)
    assert await asyncio.wait_for(result.pending(), 5) == "reference 1"
    assert result.result_or("pending") == "pending"
    maker.may_end.set()
    assert await result.finished() == 1
    assert await result.pending() == "reference 1", "who compares sees that it is the same"
    assert (result.result_or("pending"), known) == (1, ["reference 1"])


async def test_a_result_that_comes_without_a_reference_stands_for_one() -> None:
    maker, known = Maker(), list[str]()
    maker.is_silent = True
    result = making(maker, known)
    waiting = asyncio.create_task(result.pending())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    maker.may_end.set()
    assert await asyncio.wait_for(waiting, 5) == "of result 1"
    await asyncio.sleep(0)
    assert known == ["of result 1"]


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_failure_reaches_who_waits_for_the_result(is_silent: bool) -> None:
    maker = Maker()
    maker.is_silent, maker.failure = is_silent, ValueError("a bug")
    result = making(maker)
    maker.may_end.set()
    with pytest.raises(ValueError, match="a bug"):
        await result.finished()
    assert result.result_or("pending") == "pending"
    if is_silent:
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(result.pending(), 5)


async def test_what_is_lost_is_made_anew() -> None:
    maker, known = Maker(), list[str]()
    maker.may_end.set()
    result = making(maker, known)
    assert await result.finished() == 1
    result.start()
    assert await asyncio.wait_for(result.pending(), 5) == "reference 2"
    assert await result.finished() == 2
    assert known == ["reference 1", "reference 2"]


async def test_closing_ends_the_making_and_leaving_does_not() -> None:
    maker = Maker()
    result = making(maker)
    waiting = asyncio.create_task(result.finished())
    await result.pending()
    waiting.cancel()
    await asyncio.wait([waiting])
    maker.may_end.set()
    assert await result.finished() == 1
    other = making(Maker())
    await other.aclose()
    with pytest.raises(asyncio.CancelledError):
        await other.finished()
