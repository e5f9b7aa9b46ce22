"""What a stage is making, to which other stages get a reference before it is there."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from raylens.deployments.stages.stage_calls import has_result

PendingT = TypeVar("PendingT")
ResultT = TypeVar("ResultT")

Announce = Callable[[PendingT], None]


class InTheMaking(Generic[PendingT, ResultT]):
    """The result of `make`, which starts at once, and what `make` announces before it returns.

    `make` announces what others may be given in the result's place, as soon as a replica has taken the call, and again
    whenever another replica has taken it because the first one died. `announcement` tells what it would have announced
    of a result that comes without, as from a cache. `on_known` hears of every announcement.
    """

    latest: PendingT | None
    """The last announcement."""
    _task: asyncio.Task[ResultT]

    def __init__(
        self,
        make: Callable[[Announce[PendingT]], Coroutine[Any, Any, ResultT]],
        announcement: Callable[[ResultT], PendingT],
        on_known: Announce[PendingT] = lambda _: None,
    ) -> None:
        self._make = make
        self._announcement = announcement
        self._on_known = on_known
        self._is_known = asyncio.Event()
        self.start()

    def start(self) -> None:
        """Also starts anew, when the result is lost."""
        self._is_known.clear()
        self.latest = None
        self._task = asyncio.create_task(self._make(self._note))
        self._task.add_done_callback(self._end)

    async def pending(self) -> PendingT:
        """Returns the last announcement. Raises the failure of a `make` that fails before the first one."""
        await self._is_known.wait()
        return self._announcement(await self.finished()) if self.latest is None else self.latest

    async def finished(self) -> ResultT:
        """Raises what `make` raises."""
        return await asyncio.shield(self._task)

    def result_or(self, pending: PendingT) -> ResultT | PendingT:
        """Returns the result if it is there, else `pending`."""
        return self._task.result() if has_result(self._task) else pending

    async def aclose(self) -> None:
        """Ends the making, unless it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _note(self, pending: PendingT) -> None:
        self.latest = pending
        self._is_known.set()
        self._on_known(pending)

    def _end(self, task: asyncio.Task[ResultT]) -> None:
        if self.latest is None and has_result(task):
            self._note(self._announcement(task.result()))
        self._is_known.set()
