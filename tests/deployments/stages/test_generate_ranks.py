"""Ranks as actors, without Ray Serve: how they end in good order, and what a start says that loses one."""

import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylens.deployments.config import GenerateConfig
from raylens.deployments.stages.generate_ranks import RankActors, meeting_hosts
from raylens.deployments.stages.process_setup import set_up_torch
from tests.replicas import worker_pids

pytestmark = pytest.mark.usefixtures("ray_port")


class Replica:
    """What a replica of Generate does with its ranks."""

    def __init__(self, settings: GenerateConfig) -> None:
        self._ranks = RankActors(settings)
        self._ended: list[str] = []
        set_up_torch(1)

    def load(self, model: str, lost_pid: int = 0, when: str = "") -> int:
        """The most tokens of a sequence. The rank of `lost_pid` is killed as soon as rank 0 calls `when`."""
        from raylens.llm.config import EngineConfig

        with killed_at(when, lost_pid) if when else nullcontext():
            engine = self._ranks.load_engine(EngineConfig(model, kv_cache_bytes=2**22))
        self._ranks.run(lambda error: self._ended.append(str(error)))
        return engine.max_model_len

    def stop(self) -> tuple[list[str], list[bool]]:
        """Which ranks ended before they were told to, and for each whether it has ended well now."""
        self._ranks.stop()
        return self._ended, [run.done() and run.exception() is None for run in self._ranks._runs]


@contextmanager
def killed_at(name: str, pid: int) -> Iterator[None]:
    """Kills the process when this one calls what has that name, `module.attribute`."""
    original = pkgutil.resolve_name(name)

    def kill_and_call(*args: Any, **options: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        return original(*args, **options)

    with mock.patch(name, kill_and_call):
        yield


@pytest.fixture
def replica() -> Iterator[Any]:
    settings = GenerateConfig(tensor_parallel_size=2, num_cpus=0.5)
    group = placement_group([{"CPU": 0.5}] * 2)
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    actor: Any = ray.remote(Replica)
    yield actor.options(num_cpus=0.5, scheduling_strategy=place).remote(settings)
    remove_placement_group(group)
    wait_until(lambda: not rank_pids())


def rank_pids() -> list[int]:
    return worker_pids("GenerateRank")


def wait_until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_end_in_good_order(shapes: str, replica: Any) -> None:
    ray.get(replica.load.remote(shapes), timeout=60)
    assert ray.get(replica.stop.remote(), timeout=20) == ([], [True])


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    [
        pytest.param("raylens.llm.ranks.parallel.listen", id="before"),
        pytest.param("raylens.llm.model_runner.probe_layers", id="after"),
    ],
)
def test_a_rank_that_dies_before_or_after_the_ranks_have_met_ends_the_start(
    shapes: str, replica: Any, when: str
) -> None:
    """Before, rank 0 waits for it, and no connection closes; after, rank 0 knows only that a connection was closed."""
    wait_until(rank_pids)
    load = replica.load.remote(shapes, rank_pids()[0], when)
    with pytest.raises(RuntimeError, match="rank 1 could not load: ActorDiedError: The actor died"):
        ray.get(load, timeout=40)


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_the_start(shapes: str, replica: Any) -> None:
    with pytest.raises(RuntimeError, match="rank [01] could not load: OSError: "):
        ray.get(replica.load.remote(f"{shapes}/nothing"), timeout=60)


def test_ranks_of_one_node_talk_over_loopback_only() -> None:
    assert meeting_hosts(["10.0.0.7"] * 3) == ["127.0.0.1"] * 3
    assert meeting_hosts(["10.0.0.7", "10.0.0.7", "10.0.0.8"]) == ["10.0.0.7", "10.0.0.7", "10.0.0.8"]
