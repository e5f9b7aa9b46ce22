"""Runs the whole application under load and kills its processes one after the other.

    python -m benchmarks.soak [--minutes 20] [--period 30] [--output FILE]

Two ingresses, two shards, and two replicas of each stage, on one machine. Three clients ask about new pictures, and two
read long streams. Every `--period` seconds one process is killed: a replica of each stage, of the ingress and of the
shards in turn, HAProxy, and Ray Serve's controller. Clients retry as OpenAI's client does by default. All tensors go
through the object store, and the small caches fill quickly.

Checks: every answer is right. A stream breaks only shortly after a kill, and without an error event only if HAProxy,
which holds its connection, was killed. The memory of all processes (PSS) does not grow. After the clients have left,
the object store holds no more than the caches count. After the server ends, no process remains. The last line is one
JSON document."""

import itertools
import os
import random
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import ray

from benchmarks.document import at_least, at_most, make_parser, publish, this_machine
from benchmarks.server_process import tree_of
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import running_app
from tests.background import Background
from tests.metric_values import gauge
from tests.replicas import proxy_pids, replica_pids, worker_pids
from tests.steady_clients import SteadyClients

VICTIMS = ("Generate", "Encode", "Ingress", "Preprocess", "Shared-1", "ServeController", "Shared-0", "HAProxy")
CACHE_BYTES = 2 * 2**20
STORE_SLACK_BYTES = 2**20
MOST_GROWTH = 1.1
_SAMPLE_SECONDS = 5.0
_AFTER_KILL_SECONDS = 8.0
"""After a kill, streams may break for this long, and memory is not measured while processes are replaced."""
_SETTLE_SECONDS = 20.0


def config() -> AppConfig:
    two = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.25}
    caches = {"processor_cache_bytes": CACHE_BYTES, "embedding_cache_bytes": CACHE_BYTES}
    settings = dict.fromkeys(("ingress", "preprocess", "encode", "generate"), two)
    shared = {"shards": 2, "num_cpus": 0.1, **caches}
    return AppConfig.model_validate({"model": str(BUNDLED_MODEL), "shared": shared, **settings})


class Killer(Background):
    """Kills a process every `period` seconds while the block runs. `kills`: times and victims."""

    def __init__(self, period: float) -> None:
        super().__init__(self._run)
        self._period = period
        self.kills: list[tuple[float, str]] = []

    def recent(self, at: float) -> set[str]:
        """Returns the victims killed shortly before a moment."""
        return {victim for killed_at, victim in self.kills if 0 <= at - killed_at < _AFTER_KILL_SECONDS}

    def _run(self) -> None:
        for victim in itertools.cycle(VICTIMS):
            if self.is_over.wait(self._period):
                return
            if pids := pids_of(victim):
                self.kills.append((time.monotonic(), victim))
                os.kill(random.choice(pids), signal.SIGKILL)
                print(f"killed {victim}", flush=True)


def pids_of(victim: str) -> list[int]:
    if victim == "HAProxy":
        return proxy_pids()
    return worker_pids(victim) if victim == "ServeController" else replica_pids(victim)


class Memory(Background):
    """Samples the PSS of all processes of the server, in MB, with the time of each sample."""

    def __init__(self) -> None:
        super().__init__(self._run)
        self.samples: list[tuple[float, float]] = []

    def growth(self, killer: Killer) -> float | None:
        """Returns the ratio of the last third of the samples to the first third, without the first samples. None: kills
        are too frequent for a comparison."""
        quiet = [mb for at, mb in self.samples[3:] if not killer.recent(at)]
        third = len(quiet) // 3
        if third == 0:
            return None
        return statistics.median(quiet[-third:]) / statistics.median(quiet[:third])

    def _run(self) -> None:
        while not self.is_over.wait(_SAMPLE_SECONDS):
            self.samples.append((time.monotonic(), sum(map(pss_mb, server_pids()))))


def pss_mb(pid: int) -> float:
    """Returns the memory of a process in megabytes, 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"^Pss: +(\d+)", text, re.MULTILINE)
    return 0.0 if found is None else int(found[1]) * 1024 / 1e6


def server_pids() -> list[int]:
    return [pid for pid in tree_of(os.getpid()) if pid != os.getpid()]


def store_bytes() -> float:
    total, free = ray.cluster_resources(), ray.available_resources()
    used: float = total["object_store_memory"] - free.get("object_store_memory", 0.0)
    return used


def run(minutes: float, period: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the checks and the measurements."""
    with (
        mock.patch.dict(os.environ, {"RAY_max_direct_call_object_size": "4096"}),
        running_app(config(), host="127.0.0.1", port=free_port()) as url,
    ):
        time.sleep(5.0)
        killer, memory = Killer(period), Memory()
        with SteadyClients(url, num_answers=2, max_retries=8) as clients, memory, killer:
            time.sleep(minutes * 60)
        time.sleep(_SETTLE_SECONDS)
        cached = gauge(url, "mm_cache_bytes") + gauge(url, "encoder_cache_bytes")
        stored = store_bytes()
        pids = server_pids()
    time.sleep(2.0)
    orphans = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    unexplained = [how for at, how in clients.broken if not killer.recent(at)]
    silent = [how for at, how in clients.broken if not re.match("event:", how) and "HAProxy" not in killer.recent(at)]
    measured = {
        "kills": len(killer.kills),
        "right_answers": clients.num_short,
        "whole_streams": clients.num_long,
        "broken_streams": len(clients.broken),
        "wrong": clients.wrong[:20],
        "unexplained": unexplained,
        "without_event": silent,
        "pss_mb": [round(mb) for _, mb in memory.samples],
        "store_bytes": stored,
        "cached_bytes": cached,
    }
    checks = {
        "right answers": at_least(clients.num_short, 1),
        "wrong or lost": at_most(len(clients.wrong), 0),
        "streams broken without a reason": at_most(len(unexplained), 0),
        "streams broken without an event, but for HAProxy's death": at_most(len(silent), 0),
        "bytes in the store beside the caches": at_most(stored - cached, STORE_SLACK_BYTES),
        "orphans": at_most(len(orphans), 0),
    }
    if (growth := memory.growth(killer)) is not None:
        checks["PSS, end to begin"] = at_most(growth, MOST_GROWTH)
    return checks, measured


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between two kills, default: %(default)s")
    options = parser.parse_args()
    checks, measured = run(options.minutes, options.period)
    publish({"checks": checks, "measured": measured, "machine": this_machine()}, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
