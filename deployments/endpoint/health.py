"""Polls the stages, so that `/health` answers at once and requests stop waiting for a stage that stays down."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from raylens.deployments.ray_internals.handles import has_running_replica
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.deployments.wire.stage_messages import Heartbeat, ServedModel

_PERIOD_SECONDS = 2.0
_TIMEOUT_SECONDS = 10.0
"""A heartbeat takes seconds on busy cores. Ray Serve's own checks detect a lost replica sooner."""
_LOOK_SECONDS = 0.25
_LEAST_SECONDS = 1.0
_STARTING_PERIOD_SECONDS = 0.1


@dataclass(eq=False)
class StageMonitor:
    """Asks each stage for its heartbeat every `period_s`, and more often before the first one.

    A stage is ready while it has a replica and its engine's last sign of life is younger than `timeout_s`. One ready
    deployment suffices for a stage with several. A stage in `may_rest` is ready without a replica, too, because the
    first call starts one; such a stage is not polled. `away_timeout_s`: how long requests wait for a stage that is
    down. `dispensable`: stages that another stage can replace, so requests never wait for them. Create the monitor on a
    running event loop."""

    stages: Mapping[str, Sequence[DeploymentHandle[Any]]]
    _: KW_ONLY
    away_timeout_s: float
    period_s: float = _PERIOD_SECONDS
    timeout_s: float = _TIMEOUT_SECONDS
    may_rest: Collection[str] = ()
    dispensable: Collection[str] = ()

    def __post_init__(self) -> None:
        self._last_seen: dict[str, float | None] = dict.fromkeys(self.stages)
        self._last_answer: dict[str, float] = {}
        self._away_since: dict[str, float] = {}
        self._waits: set[_Wait] = set()
        self._details: dict[str, dict[str, str]] = {}
        self.served: ServedModel | None = None
        self.adapters: dict[str, str | None] = {}
        watched = [self._watch(name, handle) for name, own in self.stages.items() for handle in own]
        self._tasks = [asyncio.create_task(work) for work in (*watched, self._look_for_away())]

    async def known(self) -> None:
        """Waits until every stage has answered once."""
        while None in self._last_seen.values():
            await asyncio.sleep(_STARTING_PERIOD_SECONDS)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def saw(self, stage: str) -> None:
        """Notes a stage's answer to a request. Under load, heartbeats may queue behind the work."""
        self._last_seen[stage] = self._last_answer[stage] = time.monotonic()

    def states(self) -> dict[str, str]:
        """Returns each stage's state: "ready", "starting" (never seen), "absent" (no replica) or "unresponsive"."""
        return {name: self._state(name, age) for name, age in self.ages().items()}

    def ages(self) -> dict[str, float | None]:
        """Returns the seconds since each stage's last sign of life, or None before the first."""
        now = time.monotonic()
        return {name: None if seen is None else now - seen for name, seen in self._last_seen.items()}

    def details(self) -> dict[str, dict[str, str]]:
        return {name: told for name, told in self._details.items() if told}

    @property
    def is_ready(self) -> bool:
        return all(state == "ready" for name, state in self.states().items() if name not in self.dispensable)

    @asynccontextmanager
    async def while_there(self, stages: Collection[str]) -> AsyncIterator[None]:
        """Ends the block with StageUnavailableError once one of the stages has been down for `away_timeout_s`.

        The block gets a second in any case: a request with only cached items needs no stage that makes items."""
        wait = _Wait(stages)
        self._waits.add(wait)
        try:
            async with wait.timeout:
                yield
        except TimeoutError:
            if wait.missing is None:
                raise  # the block's own
            raise StageUnavailableError(wait.missing, f"the {wait.missing} stage is not available") from None
        finally:
            self._waits.discard(wait)

    def _state(self, name: str, age: float | None) -> str:
        if age is None:
            return "starting"
        if not self._has_replica(name):
            return "ready" if name in self.may_rest else "absent"
        return "ready" if age < self.timeout_s else "unresponsive"

    def _is_away(self, name: str, now: float) -> bool:
        """Returns whether calls to the stage are useless. A slow stage is not down: one step may take long."""
        if name not in self.may_rest and not self._has_replica(name):
            return True
        answered = self._last_answer.get(name)
        return answered is not None and now - answered > self.timeout_s

    def _has_replica(self, name: str) -> bool:
        return any(has_running_replica(handle) for handle in self.stages[name])

    async def _watch(self, name: str, handle: DeploymentHandle[Any]) -> None:
        while True:
            if name in self.may_rest and not has_running_replica(handle):
                self.saw(name)
            else:
                # A call waits without a replica, and fails on a dying one. Neither is a sign of life.
                with suppress(Exception):  # whatever it is, the stage did not answer
                    self._hear(name, await asyncio.wait_for(handle.heartbeat.remote(), self.timeout_s))
            is_starting = self._last_seen[name] is None
            await asyncio.sleep(min(_STARTING_PERIOD_SECONDS, self.period_s) if is_starting else self.period_s)

    def _hear(self, name: str, beat: Heartbeat) -> None:
        now = self._last_answer[name] = time.monotonic()
        self._last_seen[name] = max(now - beat.age_s, self._last_seen[name] or 0.0)
        self.served = beat.served or self.served
        self.adapters = self.adapters if beat.adapters is None else beat.adapters
        self._details[name] = beat.details

    async def _look_for_away(self) -> None:
        while True:
            now = time.monotonic()
            away = [name for name in self.stages if name not in self.dispensable and self._is_away(name, now)]
            self._away_since = {name: self._away_since.get(name, now) for name in away}
            given_up = {name for name, since in self._away_since.items() if since < now - self.away_timeout_s}
            for wait in self._waits:
                wait.end_without(given_up)
            await asyncio.sleep(_LOOK_SECONDS)


class _Wait:
    """A request's wait for its `stages`. `missing`: the stage that ended the wait."""

    def __init__(self, stages: Collection[str]) -> None:
        self.timeout = asyncio.timeout(None)
        self.missing: str | None = None
        self._stages = stages
        self._began = asyncio.get_running_loop().time()

    def end_without(self, given_up: Collection[str]) -> None:
        now = asyncio.get_running_loop().time()
        stage = next((stage for stage in self._stages if stage in given_up), None)
        if stage is not None and self.missing is None and now - self._began >= _LEAST_SECONDS:
            self.missing = stage
            self.timeout.reschedule(now)
