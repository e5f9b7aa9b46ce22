"""One of two replicas of a stage stands still for some seconds: most requests go past it, and none is lost."""

import os
import signal
import time

import pytest
from openai import OpenAI

from raylens.deployments.config import AppConfig
from tests.asking_clients import AskingClients
from tests.replicas import replica_pids
from tests.waiting import wait_until

NUM_CLIENTS = 12
HELD_UP_SECONDS = 6.0
"""Less than it takes until the replica counts as dead."""


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    two = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5}
    return AppConfig.model_validate({"model": shapes, "preprocess": two, "encode": two, "generate": two})


@pytest.mark.parametrize(
    "deployment", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("Preprocess", "Encode")), "Generate"]
)
def test_requests_go_past_a_replica_that_stands_still(client: OpenAI, deployment: str) -> None:
    wait_until(lambda: len(replica_pids(deployment)) == 2)
    victim = replica_pids(deployment)[0]
    with AskingClients(client, NUM_CLIENTS) as load:
        load.wait_for(NUM_CLIENTS, timeout=60)
        os.kill(victim, signal.SIGSTOP)
        try:
            time.sleep(1)  # whatever had left it before has come
            before = load.num_right
            time.sleep(HELD_UP_SECONDS - 1)
            meanwhile = load.num_right - before
        finally:
            os.kill(victim, signal.SIGCONT)
    assert (load.wrong, load.errors) == ([], [])
    assert meanwhile > NUM_CLIENTS, "the other replica answers those that come"
    assert victim in replica_pids(deployment), "it was slow, not dead"
