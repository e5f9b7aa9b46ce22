"""A call that nobody waits for any more ends in the replica, at whatever moment its caller leaves."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from raylens.deployments.launch.app_lifetime import end_app
from raylens.deployments.ray_internals.handles import cancel_call, route_on_this_loop

TIMEOUT = 30.0


class Worker:
    """Works until it is cancelled."""

    def __init__(self) -> None:
        self._states: list[str] = []

    async def work(self) -> None:
        self._states.append("works")
        try:
            await asyncio.sleep(TIMEOUT)
        except asyncio.CancelledError:
            self._states.append("was cancelled")
            raise

    async def states(self) -> list[str]:
        return self._states


class Caller:
    """Calls the worker on its own event loop, as the ingress does."""

    def __init__(self, worker: DeploymentHandle[Any]) -> None:
        route_on_this_loop(worker)
        self._worker = worker

    async def leave(self) -> list[str]:
        """Leaves when the replica works on the call, which nobody has awaited. Returns what became of the call."""
        response = self._worker.work.remote()
        await asyncio.wait([response._replica_result_future])
        await self._until_states(1)
        cancel_call(response)
        return await self._until_states(2)

    async def _until_states(self, count: int) -> list[str]:
        while len(states := await self._worker.states.remote()) < count:
            await asyncio.sleep(0.05)
        return list(states)


@pytest.fixture(scope="module")
def caller(ray_port: int) -> Iterator[DeploymentHandle[Any]]:
    options = {"ray_actor_options": {"num_cpus": 0.1}, "graceful_shutdown_timeout_s": 1.0}
    worker = serve.deployment(Worker, **options).bind()
    yield serve.run(serve.deployment(Caller, **options).bind(worker), name="cancelled", route_prefix=None)
    end_app("cancelled")


def test_a_call_ends_that_was_taken_before_anybody_waited_for_it(caller: DeploymentHandle[Any]) -> None:
    assert caller.leave.remote().result(timeout_s=TIMEOUT / 2) == ["works", "was cancelled"]
