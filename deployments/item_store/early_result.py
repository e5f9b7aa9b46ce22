"""The result of a call, and the value that may stand in for it while a stage still computes it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from raylens.deployments.stages.stage_calls import has_result

EarlyT = TypeVar("EarlyT")
ResultT = TypeVar("ResultT")

Announce = Callable[[EarlyT], None]


class EarlyResult(Generic[EarlyT, ResultT]):
    """Runs `compute`, from now on. `compute` announces an early value, such as a reference to its result, once a
    replica has taken its call, and again each time that another replica takes the call of one that died.

    `early_of(result)`: the early value of a result that was never announced, such as a cache hit. `on_early` gets every
    early value.
    """

    latest: EarlyT | None
    """The last early value."""
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
        """Computes again, if the result is lost."""
        self._has_early.clear()
        self.latest = None
        self._task = asyncio.create_task(self._compute(self._announce))
        self._task.add_done_callback(self._end)

    async def early(self) -> EarlyT:
        """Waits for an early value and returns the last one. Raises what `compute` raises before the first one."""
        await self._has_early.wait()
        return self._early_of(await self.result()) if self.latest is None else self.latest

    async def result(self) -> ResultT:
        """Waits for the result. Raises what `compute` raises."""
        return await asyncio.shield(self._task)

    def result_or(self, early: EarlyT) -> ResultT | EarlyT:
        """Returns the result if it is there, else `early`."""
        return self._task.result() if has_result(self._task) else early

    async def aclose(self) -> None:
        """Cancels `compute`, unless it has ended."""
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
