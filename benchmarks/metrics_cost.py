"""What it costs to record metrics and to read them: the throughput of a server as it is against one that records none.

    python -m benchmarks.metrics_cost [--rounds 12] [--seconds 3] [--output FILE]

Two servers with the bundled model on their defaults run side by side, and clients ask them in turns, with the requests
of `benchmarks.tracing_cost`. The instruments of one server do nothing, through a module that its Python imports at its
start. Of the other, `/metrics` is read every SCRAPE_SECONDS.

`throughput` is in requests per second over all rounds. `cpu_ms` is the processor time of all replicas for a request, in
milliseconds, which other work on the machine moves less; the exporter's own is part of it. Ratios are those of the
server that records to the silent one. The last line is one JSON document.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.server_process import cpu_seconds, running_server
from benchmarks.tracing_cost import CHECKED, KINDS, LEAST_THROUGHPUT, MOST_CPU, Kind, Total, ask_for, compared
from deployments.local_cluster import APP_NAME, free_port
from tests.replicas import children, worker_pids

SCRAPE_SECONDS = 5.0
ROOT = Path(__file__).parents[1]
_SILENT = '''
"""Has the instruments of Raylens record nothing in this process."""
import importlib.abc, importlib.util, sys

class Silent:
    def inc(self, *arguments, **tags): pass
    set = observe = inc

def silence(module):
    module.Instrument.of = lambda self, **tags: Silent()
    module.Counter.inc = module.Gauge.set = module.Histogram.observe = Silent.inc

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "deployments.metrics.instruments":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), silence(module))
        return spec

sys.meta_path.insert(0, Finder())
'''


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Returns the processor time of all replicas, and of the exporter that one of them has started."""
        replicas = worker_pids(f"ServeReplica:{APP_NAME}:", driver=self.pid)
        return sum(cpu_seconds(pid) for replica in replicas for pid in (replica, *children(replica)))


@contextmanager
def server(environment: Mapping[str, str]) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deployments", "serve", "--model", "checkpoints/shapes", "--port", str(port)]
    with running_server(command, url, environment=environment, folder=ROOT) as process:
        yield Server(url, process.pid)


@contextmanager
def scraped(url: str) -> Iterator[None]:
    """Reads the server's metrics all the time."""
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(SCRAPE_SECONDS):
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def num_counted(url: str) -> float:
    """Returns the requests that the server's metrics know of."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("raylens_request_success_total"))


def measure(recording: Server, silent: Server, kind: Kind, rounds: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one kind of requests."""
    ways = {name: Total(one.url, one.cpu_seconds) for name, one in (("recording", recording), ("silent", silent))}
    for one in ways.values():
        asyncio.run(ask_for(one.url, kind, seconds, is_traced=False))  # warms up
    for turn in range(rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            ways[name].run(kind, seconds)
    return compared(ways)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SILENT)
        with server({}) as recording, server({"PYTHONPATH": folder}) as silent, scraped(recording.url):
            found = {
                name: measure(recording, silent, kind, options.rounds, options.seconds) for name, kind in KINDS.items()
            }
            counted = {"recording": num_counted(recording.url), "silent": num_counted(silent.url)}
    checks: dict[str, Any] = {"requests that the silent server has counted": at_most(counted["silent"], 0)}
    for kind, own in found.items():
        print(f"{kind}: {own}")
    for kind in CHECKED:
        own = found[kind]
        checks[f"throughput with metrics, {kind}"] = at_least(own["throughput_ratio"], LEAST_THROUGHPUT)
        checks[f"processor time with metrics, {kind}"] = at_most(own["cpu_ratio"], MOST_CPU)
    publish({"checks": checks, "measured": found, "counted": counted, "machine": this_machine()}, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
