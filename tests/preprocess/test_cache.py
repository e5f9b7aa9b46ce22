"""The item cache: bounded in bytes, one computation a key, nothing left of a failure."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.preprocess.cache import ItemCache

Announce = Callable[[str], None]


def create(value: str, num_bytes: int = 1) -> Callable[[Announce], Awaitable[tuple[str, int]]]:
    async def run(_: object) -> tuple[str, int]:
        await asyncio.sleep(0)
        return value, num_bytes

    return run


async def test_a_repeat_is_a_hit() -> None:
    cache: ItemCache[str, str] = ItemCache(10)
    assert await cache.get_or_create("k", create("first")) == ("first", False)
    assert await cache.get_or_create("k", create("second")) == ("first", True)
    assert (cache.stats.queries, cache.stats.hits, cache.stats.num_bytes) == (2, 1, 1)


async def test_the_least_recently_used_goes_first() -> None:
    cache: ItemCache[str, str] = ItemCache(2)
    for key in ("a", "b", "a", "c"):
        await cache.get_or_create(key, create(key))
    assert [cache.peek(key) is not None for key in "abc"] == [True, False, True]
    assert cache.stats.evictions == 1


async def test_an_item_over_the_capacity_is_given_out_but_not_kept() -> None:
    cache: ItemCache[str, str] = ItemCache(2)
    assert await cache.get_or_create("k", create("big", 3)) == ("big", False)
    assert cache.peek("k") is None
    assert cache.stats.num_bytes == 0


async def test_concurrent_callers_share_one_computation() -> None:
    calls = 0

    async def slow(_: object) -> tuple[str, int]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return "value", 1

    cache: ItemCache[str, str] = ItemCache(10)
    results = await asyncio.gather(*(cache.get_or_create("k", slow) for _ in range(5)))
    assert calls == 1
    assert [value for value, _ in results] == ["value"] * 5


async def test_what_is_known_early_reaches_all_who_wait() -> None:
    cache: ItemCache[str, str] = ItemCache(10)
    may_end = asyncio.Event()

    async def run(announce: Announce) -> tuple[str, int]:
        announce("begun")
        announce("half")
        await may_end.wait()
        announce("almost")
        return "whole", 1

    heard: dict[str, list[str]] = {"early": [], "late": [], "gone": [], "later": []}

    async def ask(name: str) -> str:
        value, _ = await cache.get_or_create("k", run, heard[name].append)
        return value

    early = asyncio.create_task(ask("early"))
    await asyncio.sleep(0.01)
    late, gone = asyncio.create_task(ask("late")), asyncio.create_task(ask("gone"))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.sleep(0.01)
    may_end.set()
    assert [await early, await late] == ["whole", "whole"]
    assert await ask("later") == "whole"
    assert heard == {
        "early": ["begun", "half", "almost"],
        "late": ["half", "almost"],
        "gone": ["half"],
        "later": [],
    }


async def test_what_a_cancelled_computation_still_tells_reaches_nobody() -> None:
    """Neither the callers of the next computation for the same key."""
    cache: ItemCache[str, str] = ItemCache(10)
    announcing: list[Announce] = []
    heard: list[str] = []

    async def run(announce: Announce) -> tuple[str, int]:
        announcing.append(announce)
        await asyncio.sleep(60 if len(announcing) == 1 else 0.01)
        return "value", 1

    first = asyncio.create_task(cache.get_or_create("k", run, heard.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(cache.get_or_create("k", run, heard.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    announcing[0]("old")
    announcing[1]("new")
    assert (await second, heard) == (("value", False), ["new"])


async def test_a_failure_reaches_all_callers_and_leaves_nothing() -> None:
    async def fail(_: object) -> tuple[str, int]:
        await asyncio.sleep(0)
        raise ValueError("broken")

    cache: ItemCache[str, str] = ItemCache(10)
    results = await asyncio.gather(*(cache.get_or_create("k", fail) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3
    assert await cache.get_or_create("k", create("good")) == ("good", False)


@pytest.mark.parametrize("turns", range(1, 7))
async def test_a_caller_that_comes_while_a_computation_fails_joins_it_or_starts_its_own(turns: int) -> None:
    has_failed = False

    async def fail(_: object) -> tuple[str, int]:
        nonlocal has_failed
        await asyncio.sleep(0)
        has_failed = True
        raise ValueError("broken")

    cache: ItemCache[str, str] = ItemCache(10)
    first = asyncio.create_task(cache.get_or_create("k", fail))
    for _ in range(turns):
        await asyncio.sleep(0)
    expected: object = ("good", False) if has_failed else ValueError
    try:
        found: object = await cache.get_or_create("k", create("good"))
    except ValueError as error:
        found = type(error)
    assert found == expected
    await asyncio.gather(first, return_exceptions=True)


async def test_a_caller_that_goes_away_does_not_take_the_others_along() -> None:
    gate = asyncio.Event()

    async def wait(_: object) -> tuple[str, int]:
        await gate.wait()
        return "value", 1

    cache: ItemCache[str, str] = ItemCache(10)
    first = asyncio.create_task(cache.get_or_create("k", wait))
    second = asyncio.create_task(cache.get_or_create("k", wait))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    gate.set()
    assert await second == ("value", False)


async def test_the_last_caller_that_goes_away_ends_the_computation() -> None:
    ended = asyncio.Event()

    async def wait(_: object) -> tuple[str, int]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "value", 1

    cache: ItemCache[str, str] = ItemCache(10)
    task = asyncio.create_task(cache.get_or_create("k", wait))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 1)
    assert await cache.get_or_create("k", create("good")) == ("good", False)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), max_size=40))
def test_never_more_bytes_than_the_capacity(requests: list[tuple[int, int]]) -> None:
    async def run() -> None:
        cache: ItemCache[str, str] = ItemCache(10)
        held: dict[str, int] = {}
        for key, num_bytes in requests:
            await cache.get_or_create(str(key), create("v", held.setdefault(str(key), num_bytes)))
            assert cache.stats.num_bytes <= 10
            assert cache.stats.num_bytes == sum(size for name, size in held.items() if cache.peek(name) is not None)

    asyncio.run(run())
