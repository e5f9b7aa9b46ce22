"""What does `raylens serve` cost before its first request, and while nobody asks anything?

    python -m benchmarks.startup [--old TREE] [--turns 3] [--idle 40] [--output FILE]

Starts `raylens serve` with a model of 40 M random weights, again and again. Each start is measured until `/health`
first answers 200: seconds, the processor seconds of all processes, and when each part of the start was over; also what
other programs of this machine took meanwhile, which should be little. Then the
server settles, and its idle processes are measured: their share of a core, and their memory as PSS, in which pages that
processes share count once. `--old` names another checked-out tree of this project, which is measured in turns with this
one. On Linux. The last line is one JSON document.
"""

import argparse
import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.document import at_most, publish, this_machine
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import tree_of
from raylens.deployments.launch.local_cluster import free_port
from tests.replicas import replica_log

THIS_TREE = Path(__file__).parents[1]
SETTLE_SECONDS = 20.0
MAX_START_SECONDS = 120.0
TARGETS = {"seconds to /health": 10.0, "idle, percent of a core": 10.0}
TICKS = os.sysconf("SC_CLK_TCK")
STAGES = ("Preprocess", "Encode", "Generate", "Ingress", "Shared-0")
SAID = {"starting Ray": "program", "starting Ray Serve": "Ray", "every stage is ready": "stages"}
"""The lines that `raylens serve` prints, and the part of the start that is over with each."""


@dataclass
class Server:
    """A running `raylens serve`. `started_at` is wall time; `said` has the seconds from then to each line."""

    process: subprocess.Popen[str]
    port: int
    started_at: float = field(default_factory=time.time)
    said: dict[str, float] = field(default_factory=dict)

    def read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.setdefault(line.strip(), time.time() - self.started_at)

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def served(tree: Path, model: Path) -> Iterator[Server]:
    """Runs the tree's `raylens serve`."""
    port = free_port()
    command = [sys.executable, "-u", "-m", "raylens", "serve", str(model), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True) as process:
        server = Server(process, port)
        reader = threading.Thread(target=server.read_lines, daemon=True)
        reader.start()
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            reader.join()


def measure(tree: Path, model: Path, idle_seconds: float) -> dict[str, Any]:
    """Starts the tree's server once and returns all that is measured of it."""
    busy = machine_cpu()
    with served(tree, model) as server:
        while not server.is_healthy():
            if time.time() - server.started_at > MAX_START_SECONDS or server.process.poll() is not None:
                raise RuntimeError(f"the server of {tree} did not start")
            time.sleep(0.05)
        seconds = time.time() - server.started_at
        others = machine_cpu() - busy
        start_cpu = by_name(cpu_of(tree_of(server.process.pid)))
        time.sleep(SETTLE_SECONDS)
        pids = tree_of(server.process.pid)
        before = cpu_of(pids)
        time.sleep(idle_seconds)
        idle = by_name({pid: (cpu - before[pid]) / idle_seconds * 100 for pid, cpu in cpu_of(pids).items()})
        parts, pss = start_in_parts(server), by_name(pss_of(pids))
    return {
        "seconds": seconds,
        "cpu_seconds": sum(start_cpu.values()),
        "others_cpu_seconds": others - sum(start_cpu.values()),
        "parts_seconds": parts,
        "cpu_seconds_by_process": start_cpu,
        "idle_percent": sum(idle.values()),
        "idle_percent_by_process": idle,
        "pss_mb": sum(pss.values()),
        "pss_mb_by_process": pss,
    }


def start_in_parts(server: Server) -> dict[str, float]:
    """Returns when each part of the start was over, in seconds from the start of the program. For the replica of a
    stage: when its process ran, when its code was imported, when it was loaded."""
    parts = {part: server.said[line] for line, part in SAID.items()}
    for pid in tree_of(server.process.pid):
        stage = process_name(pid).rpartition(":")[2]
        if stage in STAGES:
            parts[f"{stage}: process"] = started_at(pid) - server.started_at
            for part, line in (("imports", "Started"), ("loaded", "Finished")):
                parts[f"{stage}: {part}"] = logged_at(pid, f"{line} initializing replica") - server.started_at
    return parts


def logged_at(pid: int, message: str) -> float:
    """Returns the wall time at which the replica logged the message."""
    found = re.search(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{{3}}) .*{message}", replica_log(pid))
    assert found is not None, f"no {message!r} in the log of {process_name(pid)}"
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(found[2]) / 1000


def process_name(pid: int) -> str:
    """Returns Ray's title of the process, or what it runs."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    if arguments[0].startswith("ray::"):
        return arguments[0].removeprefix("ray::").partition(".")[0]  # without the method that runs just now
    for module, name in (
        ("raylens", "raylens serve"),
        ("raylens.deployments.cluster.worker_template", "worker template"),
    ):
        if module in arguments:
            return name
    scripts = [argument for argument in arguments[1:] if argument.endswith(".py")]
    return Path(scripts[0] if scripts and "python" in arguments[0] else arguments[0]).name


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third one, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def started_at(pid: int) -> float:
    """Returns the wall time at which the process was made, to the clock tick."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(stat_fields(pid)[19]) / TICKS


def by_name(amounts: dict[int, float]) -> dict[str, float]:
    """Returns what processes took, by their names."""
    used: defaultdict[str, float] = defaultdict(float)
    for pid, amount in amounts.items():
        used[process_name(pid)] += amount
    return dict(used)


def cpu_of(pids: list[int]) -> dict[int, float]:
    """Returns the processor seconds of each process. One that has ended counts with the one that waited for it."""
    return {pid: sum(int(ticks) for ticks in stat_fields(pid)[11:15]) / TICKS for pid in pids}


def machine_cpu() -> float:
    """Returns the processor seconds of everything on this machine, since it runs."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / TICKS


def pss_of(pids: list[int]) -> dict[int, float]:
    """Returns the memory of each process in megabytes, without those that have ended."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, IndexError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found[pid] = int(text.split("\nPss:")[1].split()[0]) * 1024 / 1e6
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure, rounded."""
    first = runs[0]
    return {
        name: medians([run[name] for run in runs])
        if isinstance(first[name], dict)
        else round(statistics.median(run[name] for run in runs), 2)
        for name in first
        if all(name in run for run in runs)
    }


def overview(run: dict[str, Any]) -> dict[str, float]:
    """Returns the run's figures that stand for all processes, rounded."""
    return {name: round(value, 2) for name, value in run.items() if isinstance(value, float)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another tree of this project, measured in turns with this one")
    parser.add_argument("--turns", type=int, default=3, help="starts of each tree (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=40, help="seconds of idleness measured (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    options = parser.parse_args()
    trees = {"now": THIS_TREE} | ({"before": options.old.resolve()} if options.old else {})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        for _ in range(options.turns):
            for name, tree in trees.items():
                runs[name].append(measure(tree, Path(folder), options.idle))
                print(name, overview(runs[name][-1]), flush=True)
    results = {name: medians(of_tree) for name, of_tree in runs.items()}
    values = dict(zip(TARGETS, [results["now"]["seconds"], results["now"]["idle_percent"]], strict=True))
    checks = {name: at_most(value, TARGETS[name]) for name, value in values.items()}
    each_run = {name: [overview(run) for run in of_tree] for name, of_tree in runs.items()}
    settings = this_machine(turns=options.turns, settle_seconds=SETTLE_SECONDS, idle_seconds=options.idle)
    publish({"checks": checks, **results, "each_run": each_run, "machine": settings}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
