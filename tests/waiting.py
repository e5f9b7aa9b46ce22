"""Waiting for what another task or thread brings about."""

import asyncio
import time
from collections.abc import Callable

_SECONDS = 60.0
"""A busy machine takes long for what another takes a second for."""


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"did not come about in {_SECONDS:g} s"
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], bool], seconds: float = _SECONDS) -> None:
    """The same for what other processes bring about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"did not come about in {seconds:g} s"
        time.sleep(0.1)
