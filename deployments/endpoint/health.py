"""Watches whether every stage is alive. The ingress asks the stages in the background, so that `/health` answers at
once."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.stages.stage_messages import Heartbeat, ServedModel

_STARTING_PERIOD_SECONDS = 0.1


class StageMonitor:
    """Asks each stage for its heartbeat every `period_s`, and more often before its first one. A stage is ready while
    its last heartbeat is recent and its engine was moving then. One that has several deployments is while one of these
    is. Create the monitor on a running event loop."""

    def __init__(
        self, stages: Mapping[str, Sequence[DeploymentHandle[Any]]], *, period_s: float, timeout_s: float
    ) -> None:
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._last_seen: dict[str, float | None] = dict.fromkeys(stages)
        self._details: dict[str, dict[str, str]] = {}
        self.served: ServedModel | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(name, handle)) for name, own in stages.items() for handle in own]

    async def known(self) -> None:
        """Waits until every stage has answered once."""
        while None in self._last_seen.values():
            await asyncio.sleep(_STARTING_PERIOD_SECONDS)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def saw(self, stage: str) -> None:
        """Notes that a stage has answered a request: under load a heartbeat may have to queue behind the work."""
        self._last_seen[stage] = time.monotonic()

    def states(self) -> dict[str, str]:
        """Returns the state of each stage: "ready", "starting" (never seen) or "unresponsive"."""
        now = time.monotonic()
        return {name: self._state(seen, now) for name, seen in self._last_seen.items()}

    def details(self) -> dict[str, dict[str, str]]:
        """Returns what each stage has told of itself, if it has told anything."""
        return {name: told for name, told in self._details.items() if told}

    @property
    def is_ready(self) -> bool:
        return all(state == "ready" for state in self.states().values())

    def _state(self, seen: float | None, now: float) -> str:
        if seen is None:
            return "starting"
        return "ready" if now - seen < self._timeout_s else "unresponsive"

    async def _watch(self, name: str, handle: DeploymentHandle[Any]) -> None:
        while True:
            # A call to a stage without replicas waits, and one to a dying replica fails: both are no sign of life.
            try:
                beat: Heartbeat = await asyncio.wait_for(handle.heartbeat.remote(), self._timeout_s)
                self._last_seen[name] = max(time.monotonic() - beat.age_s, self._last_seen[name] or 0.0)
                self.served = beat.served or self.served
                self._details[name] = beat.details
            except Exception:  # whatever it is, the stage did not answer
                pass
            is_starting = self._last_seen[name] is None
            await asyncio.sleep(min(_STARTING_PERIOD_SECONDS, self._period_s) if is_starting else self._period_s)
