"""The replica processes of the application that the tests run, found among this machine's processes."""

import os
from pathlib import Path

from deployments.local_cluster import APP_NAME


def replica_pids(deployment: str) -> list[int]:
    """Processes of the deployment's replicas in the cluster that this process started."""
    return worker_pids(f"ServeReplica:{APP_NAME}:{deployment}")


def worker_pids(title: str) -> list[int]:
    """Ray's processes with this at the start of their title in the cluster that this process started: its raylet's
    children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            is_ours = parent(parent(int(folder.name))) == os.getpid()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        if command.startswith(f"ray::{title}") and is_ours:
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    """The parent's pid; field 4 of /proc/PID/stat, counted behind the name in brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
