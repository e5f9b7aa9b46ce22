"""What it costs to record metrics and to read them: the throughput of a server as it is against one that records none.

    python -m benchmarks.metrics_cost [--rounds 8] [--seconds 4] [--output FILE]

Two servers with the bundled model on their defaults run side by side, and clients ask them in turns, as in
`benchmarks.observability`: with small pictures that are new each time, and with text alone. The instruments of one
server do nothing, through a module that its Python imports at its start. Of the other, `/metrics` is read every
SCRAPE_SECONDS. A ratio is that of a round to its neighbour on the server without metrics; the figure is the median of
all. The last line is one JSON document.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.document import at_least, publish, this_machine
from benchmarks.observability import KINDS, TARGET, requests_per_second
from benchmarks.server_process import running_server
from deployments.local_cluster import free_port

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


@contextmanager
def server(environment: Mapping[str, str]) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deployments", "serve", "--model", "checkpoints/shapes", "--port", str(port)]
    with running_server(command, url, environment=environment, folder=ROOT):
        yield url


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


def measure(recording: str, silent: str, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns the requests per second of each kind on both servers, and the ratios of neighbours."""
    found: dict[str, dict[str, Any]] = {kind: {"recording": [], "silent": []} for kind in KINDS}
    servers = {"recording": recording, "silent": silent}
    for turn in range(rounds + 1):
        for kind in KINDS:
            for name in sorted(servers, reverse=turn % 2 == 1):
                rate = asyncio.run(requests_per_second(servers[name], kind, seconds, is_traced=False))
                if turn > 0:  # the first round warms up
                    found[kind][name].append(round(rate, 1))
    for own in found.values():
        ratios = [on / off for on, off in zip(own["recording"], own["silent"], strict=True)]
        own["ratios"] = [round(one, 3) for one in ratios]
        own["ratio"] = round(statistics.median(ratios), 4)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SILENT)
        with server({}) as recording, server({"PYTHONPATH": folder}) as silent, scraped(recording):
            measured = measure(recording, silent, options.rounds, options.seconds)
            counted = {"recording": num_counted(recording), "silent": num_counted(silent)}
    for kind, own in measured.items():
        print(f"{kind}: {own}")
    checks = {f"throughput with metrics, {kind}": at_least(own["ratio"], TARGET) for kind, own in measured.items()}
    checks["requests that the silent server has counted"] = {"value": counted["silent"], "ok": counted["silent"] == 0}
    document = {"checks": checks, "measured": measured, "counted": counted, "machine": this_machine()}
    publish(document, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
