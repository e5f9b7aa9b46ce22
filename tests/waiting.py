"""Waiting for what another task or thread brings about."""

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come about in 10 s")
