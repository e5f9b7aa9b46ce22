"""New settings come while requests are under way: `serve deploy` restarts the replicas that they concern, and no client
notices."""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from ray import serve
from ray.serve.schema import ServeDeploySchema

from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import APP_NAME, LOGGING, local_ray
from raylens.deployments.ray_internals.serve_client import deploy_file
from tests.replicas import replica_pids
from tests.small_models import make_checkpoint
from tests.steady_clients import SteadyClients
from tests.waiting import wait_until

STAGES = ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")
FOR_THE_INGRESS = {"admission": {"max_queued_requests": 100}}


def replicas(number: int) -> dict[str, int]:
    return {"min_replicas": number, "max_replicas": number}


def places(number: int) -> dict[str, Any]:
    return {"engine": {"max_num_seqs": number}}


UPDATES: list[dict[str, Any]] = [
    FOR_THE_INGRESS,
    {"ingress": {**replicas(2), "num_cpus": 0.1}},
    {"generate": places(72), "encode": {"num_cpus": 0.5}},
    {"preprocess": {**replicas(2), "num_cpus": 0.5}, "encode": replicas(2), "generate": {**places(72), **replicas(2)}},
    {"ingress": {"num_cpus": 0.1}, "shared": {"num_cpus": 0.1, "processor_cache_bytes": 2**28}, "generate": places(72)}
    | {stage: replicas(1) for stage in ("preprocess", "encode")},
]
"""New arguments, places and numbers of replicas; the last one scales every stage down."""


class Cluster:
    """Ray of this machine, and the application's settings, which `serve deploy` would take from a file."""

    def __init__(self, port: int, model: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._args: dict[str, Any] = {
            "model": model,
            "ingress": {"num_cpus": 0.1},
            "shared": {"num_cpus": 0.1},
            "generate": places(80),
            "updates": {"drain_seconds": 200},
        }

    def deploy(self, change: dict[str, Any]) -> None:
        """Returns when all replicas have the new settings, and the old ones have ended or are about to."""
        self._args |= copy.deepcopy(change)
        application = {
            "name": APP_NAME,
            "import_path": "raylens.deployments.app:build_app",
            "logging_config": LOGGING,
            "args": self._args,
        }
        options = {"host": "127.0.0.1", "port": self._port}
        deployed = ServeDeploySchema.model_validate({"http_options": options, "applications": [application]})
        deploy_file(deployed)
        time.sleep(1)
        wait_until(lambda: serve.status().applications[APP_NAME].status == "RUNNING", 120)


@pytest.fixture
def cluster(shapes: str) -> Iterator[Cluster]:
    port = free_port()
    with local_ray(host="127.0.0.1", port=port, num_cpus=16, ingress_scales=True):
        yield Cluster(port, shapes)
        # It ends with Ray. By itself it would wait until HAProxy has heard of the end of the ingress.


@pytest.mark.timeout(400)
def test_no_request_is_lost_when_settings_change(cluster: Cluster) -> None:
    cluster.deploy({})
    before = {name: replica_pids(name) for name in STAGES}
    with SteadyClients(cluster.url, num_answers=3) as clients:
        time.sleep(1)
        cluster.deploy(FOR_THE_INGRESS)
        after = {name: replica_pids(name) for name in STAGES}
        wait_until(lambda: clients.num_short > 50 and clients.num_long >= 2, 120)
    assert (clients.wrong, clients.broken) == ([], [])
    assert {name for name in STAGES if before[name] != after[name]} == {"Ingress"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_further_model_comes_and_goes_and_the_first_one_s_clients_notice_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    further = {"model": make_checkpoint("qwen3_vl", tmp_path), "served_model_name": "second"}
    cluster.deploy({"preprocess": replicas(1)})
    stages = ("Preprocess", "Encode", "Generate")
    before = {name: replica_pids(name) for name in STAGES}
    with SteadyClients(cluster.url, num_answers=3) as clients:
        time.sleep(1)
        cluster.deploy({"further_models": [{**further, "preprocess": replicas(1)}]})
        second = OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=60)
        answer = second.completions.create(model="second", prompt="Hello", max_tokens=4)
        after = {name: replica_pids(name) for name in STAGES}
        further_pids = [replica_pids(f"{stage}-second") for stage in stages]
        time.sleep(1)
        cluster.deploy({"further_models": []})
        last = {name: replica_pids(name) for name in STAGES}
        wait_until(lambda: clients.num_short > 50, 120)
    assert (clients.wrong, clients.broken) == ([], [])
    assert answer.choices[0].finish_reason == "length"
    assert all(further_pids)
    for stage in stages:
        assert before[stage] == after[stage] == last[stage]
    assert [replica_pids(f"{stage}-second") for stage in stages] == [[], [], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_is_lost_and_no_stream_cut_through_five_updates(cluster: Cluster) -> None:
    cluster.deploy({})
    # The two streams' 64 answers leave some places to others.
    with SteadyClients(cluster.url, num_answers=32) as clients:
        for change in UPDATES:
            time.sleep(20)
            cluster.deploy(change)
    print(
        f"{clients.num_short} requests and {clients.num_long} streams, the longest of {clients.longest_stream:.0f} s;"
        f" lost or wrong: {clients.wrong}, cut: {clients.broken}"
    )
    assert (clients.wrong, clients.broken) == ([], [])
    assert clients.num_short + clients.num_long >= 500
    assert clients.longest_stream > 60
