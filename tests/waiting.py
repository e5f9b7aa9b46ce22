"""Waiting for what another task or thread brings about."""

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come about in 10 s")


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """The same for what other processes bring about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"did not come about in {seconds:g} s"
        time.sleep(0.1)
