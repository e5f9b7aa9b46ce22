"""The processes of the application that the tests run, found among this machine's processes."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raylens.deployments.launch.local_cluster import APP_NAME


def replica_pids(deployment: str) -> list[int]:
    """Processes of the deployment's replicas in the cluster that this process started."""
    others = set(worker_pids(f"ServeReplica:{APP_NAME}:{deployment}-"))  # of a further model
    return [pid for pid in worker_pids(f"ServeReplica:{APP_NAME}:{deployment}") if pid not in others]


def worker_pids(title: str, driver: int | None = None) -> list[int]:
    """Ray's processes with this at the start of their title in the cluster that the process `driver`, by default this
    one, started: its raylet's children."""
    driver = os.getpid() if driver is None else driver
    return _pids(f"ray::{title}", lambda pid: parent(parent(pid)) == driver)


def replica_log(pid: int) -> str:
    """Returns what the replica of this process has logged, from the log file that Ray Serve keeps open for it."""
    opened = {Path(os.path.realpath(link)) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return "".join(file.read_text() for file in opened if file.parent.name == "serve" and file.suffix == ".log")


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Lets these processes stand still during the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def proxy_pids() -> list[int]:
    """What speaks HTTP in the cluster that this process started: HAProxy, the child of the actor that starts it."""
    return [child for manager in worker_pids("HAProxyManager") for child in children(manager)]


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    return _pids("", lambda child: parent(child) == pid)


def _pids(command: str, is_meant: Callable[[int], bool]) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            begins = (folder / "cmdline").read_bytes().decode(errors="replace").startswith(command)
            if begins and is_meant(int(folder.name)):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return found


def parent(pid: int) -> int:
    """The parent's pid; field 4 of /proc/PID/stat, counted behind the name in brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
