"""The clock of a simulation, and coroutines that wait on it."""

import heapq
import itertools
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import partial
from typing import Any

Action = Callable[[], None]
Begin = Callable[[Action], Any]
"""Starts an operation that calls the action at its end."""


class Clock:
    """Runs actions at their times, simultaneous ones in order of submission. `now`: seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


@types.coroutine
def until(begin: Begin) -> Generator[Begin, None, None]:
    """Calls `begin` and suspends the coroutine until the action passed to `begin` is called."""
    yield begin


def start(coroutine: Coroutine[Begin, None, None]) -> None:
    """Runs a coroutine up to its next `until`; the awaited action resumes it."""
    try:
        begin = coroutine.send(None)
    except StopIteration:
        return
    begin(partial(start, coroutine))


async def together(coroutines: Iterable[Coroutine[Begin, None, None]]) -> None:
    """Starts all coroutines and returns when the last one has ended."""
    running = list(coroutines)

    def begin(then: Action) -> None:
        async def run(coroutine: Coroutine[Begin, None, None]) -> None:
            await coroutine
            running.remove(coroutine)
            if not running:
                then()

        for coroutine in list(running):
            start(run(coroutine))

    if running:
        await until(begin)
