"""The result of a call, with an early value that stands in while a stage computes it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from raylens.deployments.stages.stage_calls import has_result

EarlyT = TypeVar("EarlyT")
ResultT = TypeVar("ResultT")

Announce = Callable[[EarlyT], None]


class EarlyResult(Generic[EarlyT, ResultT]):
    """Starts `compute` at once. `compute` announces an early value, such as a reference to its result, when a replica
    takes its call, and again if that replica dies and another one takes over.

    `early_of(result)`: the early value to report for a result that was never announced, such as a cache hit. `on_early`
    gets every early value."""

    latest: EarlyT | None
    """The latest early value."""
    _task: asyncio.Task[ResultT]

    def __init__(
        self,
        compute: Callable[[Announce[EarlyT]], Coroutine[Any, Any, ResultT]],
        early_of: Callable[[ResultT], EarlyT],
        on_early: Announce[EarlyT] = lambda _: None,
    ) -> None:
        self._compute = compute
        self._early_of = early_of
        self._on_early = on_early
        self._has_early = asyncio.Event()
        self.start()

    def start(self) -> None:
        """Also restarts the computation after its result was lost."""
        self._has_early.clear()
        self.latest = None
        self._task = asyncio.create_task(self._compute(self._announce))
        self._task.add_done_callback(self._end)

    async def early(self) -> EarlyT:
        """Waits for an early value and returns the latest one. Raises any error of `compute` that precedes the first
        one."""
        await self._has_early.wait()
        return self._early_of(await self.result()) if self.latest is None else self.latest

    async def result(self) -> ResultT:
        """Waits for the result. Raises any error of `compute`."""
        return await asyncio.shield(self._task)

    def result_or(self, early: EarlyT) -> ResultT | EarlyT:
        """Returns the result if it is ready, else `early`."""
        return self._task.result() if has_result(self._task) else early

    async def aclose(self) -> None:
        """Cancels `compute` if it is still running."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _announce(self, early: EarlyT) -> None:
        self.latest = early
        self._has_early.set()
        self._on_early(early)

    def _end(self, task: asyncio.Task[ResultT]) -> None:
        if self.latest is None and has_result(task):
            self._announce(self._early_of(task.result()))
        self._has_early.set()
