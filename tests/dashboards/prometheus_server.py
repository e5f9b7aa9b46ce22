"""Debian's Prometheus on loopback, with the project's own configuration. Only ports and intervals differ."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from dashboards.prometheus_api import PrometheusApi
from raylens.deployments.free_port import free_port
from tests.waiting import wait_until

SCRAPE_SECONDS = 3
_DASHBOARDS = Path(__file__).parents[2] / "dashboards"
_RAYS_FILE = "/tmp/ray/prom_metrics_service_discovery.json"
_STATE_OF_MINUTES = re.compile(r"((?:deriv|min_over_time|quantile_over_time)\([^\[]+\[\d+)m\]")


def exporter_address() -> str:
    """Of the exporter of the node on which this process drives Ray."""
    from raylens.deployments.metrics.exporter import ADDRESS_FILE
    from raylens.deployments.metrics.recording import metrics_folder

    return (metrics_folder() / ADDRESS_FILE).read_text()


def agent_addresses() -> list[str]:
    """Of Ray's agents of all nodes, as Ray's dashboard writes them into the file for Prometheus."""
    import ray

    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def cluster_config(folder: Path, *, exporter: str, agents: list[str]) -> str:
    """`exporter`: an address whose port is that of every node's exporter. `agents` take the place of Ray's file."""
    targets = folder / "targets.json"
    targets.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": agents}]))
    changed = {_RAYS_FILE: str(targets), "$1:8081": f"$1:{exporter.rpartition(':')[2]}"}
    return _replaced((_DASHBOARDS / "prometheus.yml").read_text(), changed)


def api_config(folder: Path, *, port: int, key: str) -> str:
    """The API is at this port, and has this key."""
    file = folder / "key"
    file.write_text(key)
    theirs = "# authorization:\n    #   credentials_file: /etc/prometheus/raylens-api-key"
    changed = {":8000": f":{port}", theirs: f"authorization: {{credentials_file: {file}}}"}
    return _replaced((_DASHBOARDS / "prometheus-api.yml").read_text(), changed)


@contextmanager
def prometheus(folder: Path, config: str, *, alerts_wait: bool = True) -> Iterator[PrometheusApi]:
    """Runs it with its data in `folder`. `alerts_wait`: whether alerts fire only after the time that they have to last,
    and whether gauges are looked at over minutes. Otherwise they fire at once, and gauges are looked at over seconds.

    Raises RuntimeError where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("Prometheus is not installed; as root, `make prometheus` does it")
    shutil.copytree(_DASHBOARDS / "rules", folder / "rules")
    if not alerts_wait:
        alerts = folder / "rules" / "alerts.yml"
        at_once = re.sub(r"^(    for: ).*$", r"\g<1>0s", alerts.read_text(), flags=re.MULTILINE)
        in_seconds, number = _STATE_OF_MINUTES.subn(r"\1s]", at_once)
        assert number == 3
        alerts.write_text(in_seconds)
    # An answer may take as long as the interval: on a busy machine Ray's agent needs more than a second for one.
    soon = config.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_SECONDS}s")
    (folder / "prometheus.yml").write_text(re.sub(r"evaluation_interval: \d+s", "evaluation_interval: 1s", soon))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
        "--web.enable-admin-api",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until(lambda: _is_ready(url) or server.poll() is not None)
            if server.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            yield PrometheusApi(url)
        finally:
            server.terminate()


def forget(api: PrometheusApi) -> None:
    """Has it delete all that it has seen so far."""
    everything = {"match[]": '{__name__!=""}'}
    httpx.post(f"{api.url}/api/v1/admin/tsdb/delete_series", params=everything, trust_env=False).raise_for_status()


def targets(folder: Path, config: str, job: str) -> set[str]:
    """The addresses that a configuration has Prometheus read for a job, as promtool finds them."""
    file = folder / "prometheus.yml"
    file.write_text(config)
    command = ["promtool", "check", "service-discovery", "--timeout=1s", str(file), job]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {target["labels"]["instance"] for target in found}


def _replaced(text: str, changed: dict[str, str]) -> str:
    for theirs, ours in changed.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
