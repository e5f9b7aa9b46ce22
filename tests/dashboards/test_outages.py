"""A real Prometheus pages about each real outage of a real server, and about nothing else.

The slow tests have the rules and intervals as they are shipped. They print the seconds for docs/alerts.md."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dashboards.prometheus_api import PrometheusApi
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import APP_NAME
from tests.dashboards.prometheus_server import (
    blackbox_exporter,
    cluster_config,
    probe_config,
    prometheus,
    wait_for_alert,
)
from tests.ended_servers import Server, serving
from tests.replicas import children, stopped, worker_pids
from tests.waiting import wait_until

_NODES = """
import json, sys
from ray._private.node import Node
from ray._private.parameter import RayParams

for _ in range(2):
    joining = RayParams(node_ip_address="127.0.0.1", num_cpus=0, object_store_memory=10**8, **json.loads(sys.argv[1]))
    node = Node(joining, head=False, shutdown_at_exit=False, spawn_reaper=False)
    print(node.all_processes["raylet"][0].process.pid, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Watched:
    """`raylet`: of a second node. A third one has ended as planned. `inside`: the Prometheus that reads the nodes.
    `outside`: the one that reads and probes the endpoint. `patience`: the seconds that an alert may take."""

    server: Server
    raylet: int
    inside: PrometheusApi
    outside: PrometheusApi
    patience: float

    def wait_for_page(self, api: PrometheusApi, name: str, since: float, **labels: str) -> None:
        """Prints the seconds since the outage."""
        wait_for_alert(api, name, self.patience, severity="page", **labels)
        print(f"{name} {labels} after {time.monotonic() - since:.0f} s")

    def firing(self) -> set[str]:
        pages = 'ALERTS{alertstate="firing",severity="page"}'
        return {one.labels["alertname"] for api in (self.inside, self.outside) for one in api.at(pages)}

    def pid_of(self, title: str) -> int:
        (pid,) = worker_pids(title, self.server.pid)
        return pid

    def is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.server.url}/health", trust_env=False).status_code == 200
        return False


@pytest.fixture(scope="module", params=["at once", pytest.param("as shipped", marks=pytest.mark.slow)])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    is_shipped = request.param == "as shipped"
    inside, outside = (tmp_path_factory.mktemp(name) for name in ("inside", "outside"))
    exporter_port = free_port()
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(serving("--set", f"metrics.port={exporter_port}"))
        server.wait_for_line("loading")
        agent = f"127.0.0.1:{_raylet_flag(server, 'metrics-export-port')}"
        joining = enter(joined_nodes(server))
        exporter = f"127.0.0.1:{exporter_port}"
        prober = enter(blackbox_exporter(outside))
        of_nodes, of_endpoint = (
            enter(prometheus(folder, config, alerts_wait=is_shipped, own_intervals=is_shipped))
            for folder, config in (
                (inside, cluster_config(inside, exporter=exporter, agents=[agent])),
                (outside, probe_config(port=server.port, prober=prober)),
            )
        )
        server.wait_for_line("curl ")
        assert joining.stdout is not None
        raylet, planned = int(joining.stdout.readline()), int(joining.stdout.readline())
        os.kill(planned, signal.SIGTERM)
        yield Watched(server, raylet, of_nodes, of_endpoint, patience=240 if is_shipped else 40)


@pytest.fixture(autouse=True)
def calm(watched: Watched) -> None:
    """Before each outage Prometheus has seen the healthy server, and nothing fires but for a node that was lost."""
    seen = "raylens_lost_nodes", 'probe_success{job="raylens-probe"} == 1'
    apis = watched.inside, watched.outside
    wait_until(lambda: all(bool(api.at(one)) for api, one in zip(apis, seen, strict=True)), 120)
    wait_until(lambda: watched.firing() <= {"RaylensNodeLost"}, 120)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_page_when_the_endpoint_is_unreachable(watched: Watched) -> None:
    manager = watched.pid_of("HAProxyManager")
    with stopped(watched.pid_of("ServeController"), manager, *children(manager)):
        began = time.monotonic()
        for job in ("raylens-probe", "raylens-api"):
            watched.wait_for_page(watched.outside, "RaylensEndpointUnreachable", began, job=job)
    wait_until(watched.is_ready)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_page_when_no_ingress_is_left(watched: Watched) -> None:
    with stopped(watched.pid_of("ServeController")):  # which would start another one
        os.kill(watched.pid_of(f"ServeReplica:{APP_NAME}:Ingress"), signal.SIGKILL)
        began = time.monotonic()
        watched.wait_for_page(watched.inside, "RaylensNoIngress", began, application=APP_NAME)
        watched.wait_for_page(watched.outside, "RaylensEndpointUnreachable", began, job="raylens-probe")
    wait_until(watched.is_ready)


@pytest.mark.timeout(600)
def test_a_page_when_a_node_is_lost_but_not_when_it_ends_as_planned(watched: Watched) -> None:
    wait_until(lambda: bool(watched.inside.at("ray_node_failure_total == 1")))
    assert [one.value for one in watched.inside.at("raylens_lost_nodes")] == [0.0]
    os.kill(watched.raylet, signal.SIGKILL)
    began = time.monotonic()
    for api in (watched.inside, watched.outside):
        watched.wait_for_page(api, "RaylensNodeLost", began, application=APP_NAME)


@pytest.mark.timeout(600)
def test_a_page_when_the_server_is_dead(watched: Watched) -> None:
    watched.server.send(signal.SIGKILL, "all")
    began = time.monotonic()
    watched.wait_for_page(watched.inside, "RaylensServerDown", began)
    watched.wait_for_page(watched.outside, "RaylensEndpointUnreachable", began, job="raylens-api")
    watched.wait_for_page(watched.outside, "RaylensServerDown", began)
    assert "RaylensNoIngress" not in watched.firing()


@contextmanager
def joined_nodes(server: Server) -> Iterator["subprocess.Popen[str]"]:
    """Joins two nodes, on this machine, to the server's Ray. The process prints the pids of their raylets."""
    names = ("gcs-address", "session-name", "temp-dir")
    parameters = {name.replace("-", "_"): _raylet_flag(server, name) for name in names}
    lines = Path(f"/proc/{server.pid_of('raylet')}/environ").read_text().split("\0")
    environment = dict(line.split("=", 1) for line in lines if line)
    command = [sys.executable, "-c", _NODES, json.dumps(parameters)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def _raylet_flag(server: Server, name: str) -> str:
    command = Path(f"/proc/{server.pid_of('raylet')}/cmdline").read_text()
    found = re.search(rf"--{name}=([^\s\0]+)", command)
    assert found is not None, name
    return found[1]
