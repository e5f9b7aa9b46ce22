"""The order in which a thread works on items of different sizes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.stages.item_queue import ItemQueue

LARGE = 1000


def in_queue(test: Callable[[ItemQueue], Coroutine[Any, Any, None]]) -> None:
    with ThreadPoolExecutor(1) as thread:

        async def run() -> None:
            await test(ItemQueue(thread))

        asyncio.run(run())


async def order_of(queue: ItemQueue, sizes: list[int]) -> list[int]:
    """The numbers of items of `sizes` in the order of their turns. All came while another one was worked on."""
    opened = threading.Event()
    turns: list[int] = []
    first = asyncio.create_task(queue.run(1, opened.wait))
    others = [
        asyncio.create_task(queue.run(size, lambda number=number: turns.append(number)))  # type: ignore[misc]
        for number, size in enumerate(sizes)
    ]
    await asyncio.sleep(0)
    opened.set()
    await asyncio.gather(first, *others)
    return turns


def test_small_ones_pass_a_burst_of_large_ones() -> None:
    async def test(queue: ItemQueue) -> None:
        assert await order_of(queue, [LARGE, LARGE, LARGE, 7, 5, 7]) == [4, 3, 5, 0, 1, 2]

    in_queue(test)


def test_large_ones_get_a_quarter() -> None:
    async def test(queue: ItemQueue) -> None:
        turns = await order_of(queue, [LARGE, *[100] * 100])
        # By then 3,000 pixels of small ones have been worked on.
        assert turns.index(0) == 30

    in_queue(test)


@pytest.mark.long
@given(st.lists(st.integers(1, LARGE), max_size=30))
def test_everybody_has_a_turn_and_equals_go_by_arrival(sizes: list[int]) -> None:
    async def test(queue: ItemQueue) -> None:
        turns = await order_of(queue, sizes)
        assert sorted(turns) == list(range(len(sizes)))
        for size in set(sizes):
            assert [number for number in turns if sizes[number] == size] == [
                number for number, own in enumerate(sizes) if own == size
            ]

    in_queue(test)


def test_one_whose_caller_has_left_takes_no_turn() -> None:
    async def test(queue: ItemQueue) -> None:
        opened = threading.Event()
        done: list[str] = []
        first = asyncio.create_task(queue.run(1, opened.wait))
        second = asyncio.create_task(queue.run(1, lambda: done.append("second")))
        third = asyncio.create_task(queue.run(2, lambda: done.append("third")))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()  # what runs is not stopped, and nobody is told
        await asyncio.sleep(0)
        opened.set()
        await third
        assert done == ["third"]

    in_queue(test)


def test_a_failure_is_its_callers_own() -> None:
    def fail() -> None:
        raise ValueError("no picture")

    async def test(queue: ItemQueue) -> None:
        with pytest.raises(ValueError, match="no picture"):
            await queue.run(1, fail)
        assert await queue.run(1, lambda: 5) == 5

    in_queue(test)
