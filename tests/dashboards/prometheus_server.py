"""Debian's Prometheus and blackbox exporter on loopback, with the project's own configuration. Only ports and intervals
differ."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def probe_config(*, port: int, prober: str) -> str:
    """The API is at this port, and the blackbox exporter at the address `prober`."""
    jobs, probe = (_DASHBOARDS / "prometheus-api.yml").read_text().split("  # - job_name: raylens-probe")
    used = "  - job_name: raylens-probe" + probe.replace("\n  # ", "\n  ")
    return _replaced(jobs + used, {":8000": f":{port}", "127.0.0.1:9115": prober})


@contextmanager
def prometheus(
    folder: Path, config: str, *, alerts_wait: bool = True, own_intervals: bool = False
) -> Iterator[PrometheusApi]:
    """Runs it with its data in `folder`. `alerts_wait`: whether alerts fire only after the time that they have to last,
    and whether gauges are looked at over minutes. Otherwise they fire at once, and gauges are looked at over seconds.
    `own_intervals`: whether it scrapes and evaluates at the intervals of `config`, and not at shorter ones.

    Raises RuntimeError where it is not installed."""
    shutil.copytree(_DASHBOARDS / "rules", folder / "rules")
    if not alerts_wait:
        alerts = folder / "rules" / "alerts.yml"
        at_once = re.sub(r"^(    for: ).*$", r"\g<1>0s", alerts.read_text(), flags=re.MULTILINE)
        in_seconds, number = _STATE_OF_MINUTES.subn(r"\1s]", at_once)
        assert number == 3
        alerts.write_text(in_seconds)
    if not own_intervals:
        # An answer may take as long as the interval: on a busy machine Ray's agent needs more than a second for one.
        config = config.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_SECONDS}s")
        config = re.sub(r"evaluation_interval: \d+s", "evaluation_interval: 1s", config)
    data = f"--storage.tsdb.path={folder / 'data'}"
    with _listening("prometheus", folder / "prometheus.yml", config, data, "--web.enable-admin-api") as address:
        yield PrometheusApi(f"http://{address}")


@contextmanager
def blackbox_exporter(folder: Path) -> Iterator[str]:
    """Runs it with the module that its own configuration has for HTTP, too; yields its address."""
    modules: dict[str, Any] = {"modules": {"http_2xx": {"prober": "http"}}}
    with _listening("prometheus-blackbox-exporter", folder / "blackbox.yml", json.dumps(modules)) as address:
        yield address


@contextmanager
def _listening(program: str, file: Path, config: str, *options: str) -> Iterator[str]:
    """Runs a program with its configuration in `file`; yields its address when it is ready."""
    if shutil.which(program) is None:
        raise RuntimeError(f"{program} is not installed; as root, `make prometheus` does it")
    file.write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={file}", f"--web.listen-address={address}", "--log.level=warn", *options]
    log_file = file.with_suffix(".log")
    with log_file.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: _is_ready(address) or process.poll() is not None)
            if process.poll() is not None:
                raise RuntimeError(log_file.read_text())
            yield address
        finally:
            process.terminate()


def wait_for_alert(api: PrometheusApi, name: str, seconds: float, **labels: str) -> None:
    """Waits until the alert fires with these labels."""
    chosen = ",".join(f'{label}="{value}"' for label, value in labels.items())
    wait_until(lambda: bool(api.at(f'ALERTS{{alertname="{name}",alertstate="firing",{chosen}}}')), seconds)


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


def _is_ready(address: str) -> bool:
    try:
        # The blackbox exporter answers any path that it does not know with its home page.
        return httpx.get(f"http://{address}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
