"""When the ingress takes a stage for ready, for away and for at rest."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from raylens.deployments.endpoint import health
from raylens.deployments.endpoint.health import StageMonitor
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.deployments.wire.stage_messages import Heartbeat
from tests.virtual_time import in_virtual_time


class Stage:
    """Stands for a handle: so many replicas, which answer unless they hang."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.num_replicas = num_replicas
        self.hangs = False
        self.age_s = 0.0
        self.num_heartbeats = 0
        router = SimpleNamespace(curr_replicas=_Replicas(self))
        self._router = SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=router))
        self.heartbeat = SimpleNamespace(remote=self._beat)

    async def _beat(self) -> Heartbeat:
        self.num_heartbeats += 1
        while self.hangs or self.num_replicas == 0:
            await asyncio.sleep(0.01)
        return Heartbeat(self.age_s)


class _Replicas:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __len__(self) -> int:
        return self._stage.num_replicas


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(health, "_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


def monitor_of(stage: Stage, **options: Any) -> StageMonitor:
    handles: Any = {"encode": [stage]}
    return StageMonitor(handles, period_s=0.02, timeout_s=0.2, away_timeout_s=0.1, **options)


async def refusal(monitor: StageMonitor, seconds: float = 0.6) -> str | None:
    """What a request is told that would take so long."""
    try:
        async with monitor.while_there(["shared", "encode"]):
            await asyncio.sleep(seconds)
    except StageUnavailableError as error:
        return str(error)
    return None


@in_virtual_time
async def test_a_stage_that_answers_is_ready() -> None:
    monitor = monitor_of(Stage())
    assert monitor.states() == {"encode": "starting"}
    await monitor.known()
    assert monitor.states() == {"encode": "ready"}
    assert await refusal(monitor) is None
    monitor.close()


@pytest.mark.parametrize("fault", ["hangs", "has no replica"])
@in_virtual_time
async def test_requests_wait_for_a_stage_that_is_away_no_longer_than_they_are_told_to(fault: str) -> None:
    stage = Stage()
    monitor = monitor_of(stage)
    await monitor.known()
    if fault == "hangs":
        stage.hangs = True
    else:
        stage.num_replicas = 0
    assert await refusal(monitor, 10) == "the encode stage is not available"
    assert monitor.states() == {"encode": "unresponsive" if fault == "hangs" else "absent"}
    assert await refusal(monitor, 0.03) is None, "a cache may have all that it needs"
    assert await refusal(monitor, 10) == "the encode stage is not available"
    stage.hangs, stage.num_replicas = False, 1
    await asyncio.sleep(0.3)
    assert await refusal(monitor) is None
    monitor.close()


@in_virtual_time
async def test_a_stage_that_is_away_for_a_moment_costs_no_request() -> None:
    stage = Stage()
    monitor = monitor_of(stage)
    await monitor.known()
    stage.num_replicas = 0
    asyncio.get_running_loop().call_later(0.05, lambda: setattr(stage, "num_replicas", 1))
    assert await refusal(monitor) is None
    monitor.close()


@in_virtual_time
async def test_a_long_step_of_the_engine_is_no_reason_to_give_up() -> None:
    stage = Stage()
    monitor = monitor_of(stage)
    await monitor.known()
    stage.age_s = 100.0
    await asyncio.sleep(0.3)
    assert monitor.states() == {"encode": "unresponsive"}
    assert await refusal(monitor) is None
    monitor.close()


@in_virtual_time
async def test_a_stage_at_rest_is_ready_and_is_not_woken() -> None:
    stage = Stage(num_replicas=0)
    monitor = monitor_of(stage, may_rest=["encode"])
    await monitor.known()
    assert await refusal(monitor) is None
    assert (monitor.states(), stage.num_heartbeats) == ({"encode": "ready"}, 0)
    monitor.close()


@pytest.mark.parametrize("fault", ["no replica", "hangs"])
@in_virtual_time
async def test_nobody_waits_for_a_stage_whose_work_another_one_does(fault: str) -> None:
    stage = Stage()
    monitor = monitor_of(stage, dispensable=["encode"])
    await monitor.known()
    stage.num_replicas, stage.hangs = (0, False) if fault == "no replica" else (1, True)
    assert await refusal(monitor) is None
    assert monitor.states()["encode"] != "ready"
    assert monitor.is_ready
    monitor.close()


@in_virtual_time
async def test_a_timeout_of_the_block_s_own_stays_what_it_is() -> None:
    monitor = monitor_of(Stage())
    with pytest.raises(TimeoutError):
        async with monitor.while_there(["encode"]), asyncio.timeout(0.01):
            await asyncio.sleep(1)
    monitor.close()
