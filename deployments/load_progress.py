"""Detects whether the processes that load a model on this machine make progress."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LEAST_CPU_SHARE = 0.03  # of a core, by one process; a waiting replica takes up to 0.02 for Ray
_LEAST_BYTES = 2**20  # read or written by one process; a slow network drive delivers as many each second
_LOADING = (b"ray::ServeReplica:", b"ray::GenerateRank")  # prefixes of the titles of loading processes
_HAS_PROC = Path("/proc/self/io").exists()

_Work = tuple[float, int]  # CPU seconds, and bytes read and written


class LoadProgress:
    """Watches the replicas and ranks that this process started. A load is over after `quiet_seconds` without work."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._since = time.monotonic()
        self._then = dict(_work_done())

    def is_over(self) -> bool:
        """Returns whether no process has worked for `quiet_seconds`. Always False outside Linux."""
        now, work = time.monotonic(), dict(_work_done())
        for pid, (cpu_seconds, num_bytes) in work.items():
            cpu_before, bytes_before = self._then.get(pid, (0.0, 0))
            cpu_share = (cpu_seconds - cpu_before) / self._quiet_seconds
            if cpu_share >= _LEAST_CPU_SHARE or num_bytes - bytes_before >= _LEAST_BYTES:
                self._since, self._then = now, work
                break
        return _HAS_PROC and now - self._since >= self._quiet_seconds


def _work_done() -> Iterator[tuple[int, _Work]]:
    """Yields the replicas and ranks below this process, each with its work so far."""
    parents: dict[int, int] = {}
    work: dict[int, _Work] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            if (folder / "cmdline").read_bytes().startswith(_LOADING):
                ticks = int(fields[11]) + int(fields[12])
                counters = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                num_bytes = sum(int(counters[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
                work[pid] = ticks / os.sysconf("SC_CLK_TCK"), num_bytes
    for pid, done in work.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            yield pid, done
