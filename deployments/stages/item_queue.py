"""The order in which one thread processes items: a burst of large images must not delay small ones."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_OLDEST_SHARE = 0.25


@dataclass(slots=True, eq=False)
class _Waiting:
    num_pixels: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class ItemQueue:
    """Runs small items first. The oldest item gets a quarter of the pixels, so small items cannot starve large ones.
    Use it on one event loop; `thread` is an executor of one thread."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._waiting: list[_Waiting] = []  # by arrival
        self._is_busy = False
        self._oldest_may_take = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    async def run(self, num_pixels: int, work: Callable[[], ResultT]) -> ResultT:
        """Returns the result of `work` after its turn. The queue drops the work if the caller leaves first. `work` runs
        in the caller's context, so its log records have the request's ids."""
        work = partial(contextvars.copy_context().run, work)
        waiting = _Waiting(num_pixels, work, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._start_next()
        try:
            result: ResultT = await waiting.result
            return result
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        chosen = self._choose()
        self._waiting.remove(chosen)
        running = asyncio.get_running_loop().run_in_executor(self._thread, chosen.work)
        running.add_done_callback(lambda done: self._finish(chosen, done))

    def _choose(self) -> _Waiting:
        oldest, smallest = self._waiting[0], min(self._waiting, key=lambda one: one.num_pixels)
        if smallest is oldest:
            return oldest
        if self._oldest_may_take >= oldest.num_pixels:
            self._oldest_may_take -= oldest.num_pixels
            return oldest
        self._oldest_may_take += smallest.num_pixels * _OLDEST_SHARE / (1 - _OLDEST_SHARE)
        return smallest

    def _finish(self, finished: _Waiting, done: asyncio.Future[Any]) -> None:
        self._is_busy = False
        error = done.exception()
        if finished.result.done():
            pass  # the caller has left
        elif error is not None:
            finished.result.set_exception(error)
        else:
            finished.result.set_result(done.result())
        self._start_next()
