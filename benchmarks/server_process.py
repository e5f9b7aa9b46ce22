"""Servers in separate processes, and the CPU time of processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import APP_NAME
from tests.replicas import parent, worker_pids

TREE = Path(__file__).resolve().parent.parent
_START_SECONDS = 900.0
_END_SECONDS = 20.0
_CPUCLOCK_SCHED = 2  # Linux: together with ~pid << 3, the CPU clock of a process

Server = subprocess.Popen[bytes]


@contextmanager
def running_server(command: Sequence[str], url: str, *, environment: Mapping[str, str]) -> Iterator[Server]:
    """Runs the server and yields it once `url` has a `/health`. `environment` extends this process's. Raises
    RuntimeError with the end of the server's log if the server does not start."""
    with tempfile.TemporaryFile("w+") as log:
        env = {**os.environ, **environment}
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _await_health(url, server, log)
            yield server
        finally:
            end(server)


@contextmanager
def running_serve(settings: Mapping[str, Any]) -> Iterator[tuple[str, Server]]:
    """Yields the URL and the process of `raylens serve` with these settings."""
    application = {"import_path": "raylens.deployments.app:build_app", "args": settings}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump({"applications": [application]}, config)
        config.flush()
        command = [sys.executable, "-m", "raylens", "serve", "--config", config.name, "--port", str(port)]
        with running_server(command, url, environment={"PYTHONPATH": str(TREE)}) as server:
            yield url, server


def replica_of(server: Server, deployment: str) -> int:
    """Returns the process of the only replica of a deployment of `server`."""
    (pid,) = worker_pids(f"ServeReplica:{APP_NAME}:{deployment}", server.pid)
    return pid


def tree_of(pid: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            parents[int(folder.name)] = parent(int(folder.name))
    found = [pid]
    for one in found:
        found += [child for child, its_parent in parents.items() if its_parent == one]
    return found


def memory_of(pid: int) -> dict[str, float]:
    """Returns the PSS now and the highest RSS so far, in GB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    pss = next(line for line in rollup if line.startswith("Pss:"))
    highest = next(line for line in status if line.startswith("VmHWM:"))
    return {"pss": _gigabytes(pss), "highest_rss": _gigabytes(highest)}


def _gigabytes(line: str) -> float:
    return round(int(line.split()[1]) * 1024 / 1e9, 2)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process, including ended ones, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def thread_cpu_seconds(pid: int) -> dict[int, float]:
    """Returns the CPU time of each current thread of a process, by thread id."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return {int(file.parent.name): int(file.read_text().split()[0]) / 1e9 for file in files}


def end(server: Server) -> None:
    """Ends a server and its processes, which do not always obey SIGTERM."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _await_health(url: str, server: Server, log: Any) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0):
                return
        except OSError:
            time.sleep(1.0)
    log.seek(0)
    raise RuntimeError(f"{' '.join(server.args)} does not serve:\n{log.read()[-4000:]}")  # type: ignore[arg-type]
