"""What it costs to record metrics and to read them: the throughput of a server while it does against while it does not.

    python -m benchmarks.metrics_cost [--rounds 16] [--seconds 3] [--output FILE]

Clients ask one server with the bundled model on its defaults, with the requests of `benchmarks.tracing_cost`. A module
that its Python imports at its start turns all instruments off and on again, so that both ways run on the same
processes: two servers side by side differ by more than what is measured. Short rounds of both take turns. In each round
that records, `/metrics` is read once.

`cpu_ms` is the processor time of all replicas for a request, in milliseconds, over all rounds; the exporter's own is
part of it. `throughput` is in requests per second, the median of all rounds, and `throughput_ratio` the median of the
ratios of a round that records to the silent one beside it. `cpu_spread` and `throughput_spread` have the quartiles of
such ratios. The last line is one JSON document.
"""

import argparse
import asyncio
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.server_process import cpu_seconds, running_server
from benchmarks.tracing_cost import (
    CHECKED,
    KINDS,
    LEAST_THROUGHPUT,
    MOST_CPU,
    WARM_UP_SECONDS,
    Kind,
    Total,
    ask_while,
    compared,
)
from raylens.deployments.launch.local_cluster import APP_NAME, free_port
from tests.replicas import children, worker_pids

ROOT = Path(__file__).parents[1]
_SILENT_FILE = "silent"
_SETTLE_SECONDS = 0.5
_SWITCH = '''
"""Has the instruments of Raylens record nothing in this process while there is a file SILENT_FILE."""
import importlib.abc, importlib.util, os, sys, threading, time

FILE = os.path.join(os.path.dirname(__file__), "SILENT_FILE")

class Silent:
    def inc(self, *arguments, **tags): pass
    set = observe = observe_all = inc

SILENT = Silent()

def switch(module):
    methods = [(module.Counter, "inc"), (module.Gauge, "set"), (module.Histogram, "observe")]
    loud = [getattr(kind, name) for kind, name in methods], module.Instrument.of
    silent = [Silent.inc] * 3, lambda self, **tags: SILENT
    while True:
        recorders, of = silent if os.path.exists(FILE) else loud
        for (kind, name), recorder in zip(methods, recorders):
            setattr(kind, name, recorder)
        module.Instrument.of = of
        time.sleep(0.1)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "raylens.deployments.metrics.instruments":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def load_with_switch(module):
            load(module)
            threading.Thread(target=switch, args=(module,), daemon=True).start()
        spec.loader.exec_module = load_with_switch
        return spec

sys.meta_path.insert(0, Finder())
'''.replace("SILENT_FILE", _SILENT_FILE)


class Server:
    """The server, whose processes record metrics while there is no file `silent_file`."""

    def __init__(self, url: str, pid: int, silent_file: Path) -> None:
        self.url = url
        self._pid = pid
        self._silent_file = silent_file

    def cpu_seconds(self) -> float:
        """Returns the processor time of all replicas, and of the exporter that one of them has started."""
        return sum(map(cpu_seconds, self._pids))

    @cached_property
    def _pids(self) -> list[int]:
        replicas = worker_pids(f"ServeReplica:{APP_NAME}:", driver=self._pid)
        return [pid for replica in replicas for pid in (replica, *children(replica))]

    def record(self, *, is_recording: bool) -> None:
        if is_recording:
            self._silent_file.unlink(missing_ok=True)
        else:
            self._silent_file.touch()
        time.sleep(_SETTLE_SECONDS)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            return str(answer.read(), "utf-8")

    def num_counted(self) -> int:
        """Returns the requests that the server's metrics know of."""
        lines = self.metrics().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("raylens_request_success_total"))


@contextmanager
def switched_server() -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "raylens", "serve", "--model", "checkpoints/shapes", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SWITCH)
        with running_server(command, url, environment={"PYTHONPATH": folder}, folder=ROOT) as process:
            yield Server(url, process.pid, Path(folder) / _SILENT_FILE)


def measure(server: Server, kind: Kind, rounds: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one kind of requests."""
    ways = {name: Total(server.url, server.cpu_seconds) for name in ("recording", "silent")}
    asyncio.run(ask_while(server.url, kind, asyncio.sleep(WARM_UP_SECONDS), is_traced=False))
    before = server.num_counted()
    for turn in range(rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            server.record(is_recording=name == "recording")
            ways[name].run(kind, seconds, beside=server.metrics if name == "recording" else None)
    server.record(is_recording=True)
    return compared(ways) | {"counted": server.num_counted() - before}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="of each kind and way (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with switched_server() as server:
        found = {name: measure(server, kind, options.rounds, options.seconds) for name, kind in KINDS.items()}
    checks = {}
    for kind, own in found.items():
        print(f"{kind}: {own}")
        uncounted = abs(own["requests"]["recording"] - own["counted"])
        checks[f"requests that were not counted, or in silence, {kind}"] = at_most(uncounted, 0)
    for kind in CHECKED:
        own = found[kind]
        checks[f"throughput with metrics, {kind}"] = at_least(own["throughput_ratio"], LEAST_THROUGHPUT)
        checks[f"processor time with metrics, {kind}"] = at_most(own["cpu_ratio"], MOST_CPU)
    publish({"checks": checks, "measured": found, "machine": this_machine()}, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
