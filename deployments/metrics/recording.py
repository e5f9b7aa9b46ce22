"""Records this process's metrics in files of a folder that all replicas on a node share.

prometheus_client maps the files into memory (its multiprocess mode), so recording takes about a microsecond, and counts
survive any death of a replica. Each replica holds a file lock until it ends, so the node's exporter knows the live ones
(`deployments/metrics/exporter.py`). One replica of each node runs the exporter, which ends with it; then another one
takes over."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import prometheus_client.values
import ray

from raylens.deployments.config import MetricsConfig
from raylens.deployments.metrics.exporter import LOCK_SUFFIX
from raylens.deployments.session_folder import session_folder

logger = logging.getLogger(f"ray.serve.{__name__}")

_FILES_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_EXPORTER = Path(__file__).with_name("exporter.py")
_PAUSE_SECONDS = 1.0

_held: list[IO[str]] = []
"""Open files whose locks this process holds until it ends."""


@dataclass(frozen=True, slots=True)
class ReplicaLabels:
    """The identity of this replica; empty outside a replica."""

    application: str = ""
    deployment: str = ""
    replica: str = ""


@cache
def replica_labels() -> ReplicaLabels:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        context = serve.get_replica_context()
    except RayServeException:
        return ReplicaLabels()
    return ReplicaLabels(context.app_name, context.deployment, context.replica_tag)


def metrics_folder() -> Path:
    """Returns this node's folder, which belongs to the running Ray session."""
    return session_folder() / "raylens-metrics"


def record_metrics(config: MetricsConfig) -> None:
    """Makes this replica record its metrics for its node's exporter. Call it before creating any metric."""
    own = replica_labels()
    if not own.replica:
        return
    folder = metrics_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    identity = f"{own.deployment}-{own.replica}"
    _held.append(_locked(folder / f"{identity}{LOCK_SUFFIX}"))
    os.environ[_FILES_VARIABLE] = str(folder)
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: identity)
    arguments = (folder, ray.util.get_node_ip_address(), config.port)
    threading.Thread(target=_keep_exporter, args=arguments, name="metrics-exporter", daemon=True).start()


def _locked(path: Path) -> IO[str]:
    """Waits for the file's lock. Returns the file, which holds the lock until it is closed."""
    file = path.open("w")
    fcntl.lockf(file, fcntl.LOCK_EX)
    return file


def _keep_exporter(folder: Path, host: str, port: int) -> None:
    """Runs on a thread: waits until no other replica of the node runs an exporter, then runs one."""
    _held.append(_locked(folder / "exporter.lock"))
    environment = {name: value for name, value in os.environ.items() if name != _FILES_VARIABLE}
    command = [sys.executable, "-P", str(_EXPORTER), str(folder), host, str(port)]
    while True:
        # The exporter ends when the pipe closes.
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as exporter:
            status = exporter.wait()
        time.sleep(_PAUSE_SECONDS)  # when the node stops, this process may end only now
        logger.warning("the metrics exporter of this node ended with status %d; restarting it", status)
