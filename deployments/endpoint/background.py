"""Work that goes on when its HTTP request has been answered: responses with `background`."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from raylens.deployments.api.responses import ResponseObject
from raylens.deployments.endpoint.admission import Admission
from raylens.deployments.endpoint.call import ApiCall
from raylens.deployments.endpoint.request_cost import RequestCost
from raylens.deployments.endpoint.request_traces import TracedRequest
from raylens.deployments.item_store.shared_items import SharedResponses
from raylens.deployments.request_context import RequestContext
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.stages.stage_calls import StageUnavailableError

_MAX_JOBS = 1024
_PAUSE_SECONDS = 1.0

Begun = asyncio.Future[ResponseObject]
Work = Callable[[ApiCall, Begun], Coroutine[Any, Any, None]]
"""Makes a response. Sets the future to how it begins, or fails before."""


async def until_either(watch: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any]) -> None:
    """Does the work until it is done or the watch ends, which begins first. Raises what the first of both raises."""
    tasks = [asyncio.create_task(watch), asyncio.create_task(work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class BackgroundJobs:
    """The responses that this ingress makes in the background. Use it on one event loop."""

    shared: SharedResponses
    admission: Admission
    open_requests: PendingWork
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, response_id: str, call: ApiCall, work: Work) -> ResponseObject:
        """Starts the work and returns how the response begins. Raises what the work raises before, and OverloadedError
        if there is no room for more."""
        if len(self._tasks) >= _MAX_JOBS:
            raise self.admission.refusal("queue", f"{_MAX_JOBS} responses are made in the background already")
        begun: Begun = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(response_id, call, work, begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        first: list[asyncio.Future[Any]] = [task, begun]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            task.result()
        return begun.result()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, response_id: str, call: ApiCall, work: Work, begun: Begun) -> None:
        """Does the work, with a ticket of its own, until it is done or a client cancels it."""
        with self.open_requests.call(1), self.admission.ticket(call.caller) as ticket:
            ticket.take(RequestCost(bytes=call.ticket.held.bytes))
            own = replace(call, ticket=ticket, traced=TracedRequest(RequestContext(call.request_id)), state={})
            # The watch comes first, so that the shard knows of the work before it has the response.
            await until_either(self._until_cancelled(call.caller.cache_salt, response_id), work(own, begun))
            begun.cancel()  # does nothing unless a client cancelled the response before it began

    async def _until_cancelled(self, tenant: str, response_id: str) -> None:
        while True:
            try:
                await self.shared.until_cancelled(tenant, response_id)
                return
            except StageUnavailableError:
                await asyncio.sleep(_PAUSE_SECONDS)  # its shard starts again
