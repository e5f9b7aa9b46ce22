"""A tenant's work waits for that of the same tenant only."""

import asyncio
from itertools import pairwise

import pytest

from raylens.deployments.pipeline.turns import Turns

QUANTUM = 100


async def test_a_tenant_that_does_little_never_waits() -> None:
    turns = Turns(QUANTUM)
    for cost in (40, 40, 40):
        taken = turns.take("a", cost)
        with pytest.raises(StopIteration):
            taken.send(None)  # not a single step of the event loop


@pytest.mark.parametrize("num_requests", [10, 500])
async def test_a_tenant_waits_two_iterations_at_most_however_much_others_do(num_requests: int) -> None:
    turns, done = Turns(QUANTUM), list[str]()

    async def work(tenant: str) -> None:
        await turns.take(tenant, QUANTUM)
        done.append(tenant)

    heavy = [asyncio.create_task(work("heavy")) for _ in range(num_requests)]
    for _ in range(3):
        await asyncio.sleep(0)
    light = asyncio.create_task(work("light"))
    for _ in range(2):
        await asyncio.sleep(0)
    assert "light" in done
    assert len(done) <= 6
    await asyncio.gather(light, *heavy)
    assert done.count("heavy") == num_requests


async def test_after_large_work_a_tenant_leaves_out_as_many_iterations() -> None:
    turns, iterations = Turns(QUANTUM), list[int]()
    num_passed = 0

    async def work() -> None:
        await turns.take("heavy", 4 * QUANTUM)
        iterations.append(num_passed)

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    for _ in range(14):
        await asyncio.sleep(0)
        num_passed += 1
    assert all(later - earlier >= 4 for earlier, later in pairwise(iterations))
    assert len(iterations) == 3
    await asyncio.gather(*tasks)
    assert not turns._spent, "nothing is owed for ever"


async def test_work_of_a_tenant_goes_by_arrival_and_a_request_that_left_takes_no_turn() -> None:
    turns, done = Turns(QUANTUM), list[int]()

    async def work(number: int) -> None:
        await turns.take("a", QUANTUM)
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(20)]
    await asyncio.sleep(0)
    for left in tasks[5:10]:
        left.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert done == [*range(5), *range(10, 20)]
    assert not turns._waiting
