"""Ray asks the router for a replica by the method that is replaced. tests/deployments/routing/test_room_router.py
routes."""

import inspect
import itertools
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve._private.router import AsyncioRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from raylens.deployments.ray_internals.choosing_router import ChoosingRouter


class Replica:
    """As much of Ray's RunningReplica as a router uses."""

    max_ongoing_requests = 4
    replica_id = ReplicaID("a", DeploymentID("Worker"))

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 3


class Router(ChoosingRouter):
    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        raise AssertionError

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        return pending_request.args[0]


def router() -> Router:
    options = {"use_replica_queue_len_cache": True, "initial_backoff_s": 2, "max_backoff_s": 2}
    made = Router(DeploymentID("Worker"), DeploymentHandleSource.UNKNOWN, get_curr_time_s=lambda: 7.0, **options)
    made.update_replicas([Replica()])
    return made


async def test_a_call_gets_the_replica_that_the_router_chooses() -> None:
    metadata: Any = None
    replica = await router()._choose_replica_for_request(PendingRequest(["chosen"], {}, metadata, created_at=6.0))
    assert replica == "chosen"


@pytest.mark.parametrize(("keeps", "expected"), [(True, 3), (False, None)])
def test_reports_are_kept(keeps: bool, expected: int | None) -> None:
    clock = itertools.chain([0.0], itertools.repeat(1e6))
    options = {"use_replica_queue_len_cache": True, "get_curr_time_s": lambda: next(clock)}
    made = Router(DeploymentID("Worker"), DeploymentHandleSource.UNKNOWN, **options)
    if keeps:
        made.keep_reports()
    made.replica_queue_len_cache.update(Replica.replica_id, 3)
    assert made.replica_queue_len_cache.get(Replica.replica_id) == expected


def test_ray_asks_by_the_method_that_is_replaced() -> None:
    source = inspect.getsource(AsyncioRouter)
    assert source.count("._choose_replica_for_request(") == 2
    own, of_ray = (
        inspect.signature(one._choose_replica_for_request).parameters for one in (ChoosingRouter, RequestRouter)
    )
    assert [*own] == [*of_ray]


async def test_a_replica_that_is_asked_tells_its_load() -> None:
    made = router()
    await made.probe(Replica(), 0)
    assert made.replica_queue_len_cache.get(Replica.replica_id) == 3


async def test_pauses_and_times_are_the_base_class_s() -> None:
    assert (router().backoff_s(5), router().now_s()) == (2, 7.0)
