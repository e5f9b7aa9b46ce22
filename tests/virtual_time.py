"""An event loop that skips waiting: where nothing is ready, its time jumps to the next timer. So tests of periods and
timeouts take no time, and a busy machine makes none of them fail. Threads and sockets would be left behind."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import ParamSpec

P = ParamSpec("P")


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if not events and timeout:
            self.passed += timeout
        return events


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` is in seconds since its start, and stands still while something runs."""

    def __init__(self) -> None:
        self._waiting = _NoWaiting()
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._waiting.passed


def in_virtual_time(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Runs an async test on such a loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
