"""Serves a node's metrics in Prometheus' text format over HTTP, for all replicas of the node, including ended ones.

    python exporter.py FOLDER HOST PORT

It reads the files that replicas write through `deployments/metrics/recording.py`, and ends when its standard input
closes, with its parent replica. It imports nothing of the application, to save memory. If PORT is 0 or taken, it uses a
free port. FOLDER/exporter.address holds the address."""

import fcntl
import json
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

LOCK_SUFFIX = ".alive"
ADDRESS_FILE = "exporter.address"
_KEPT_KINDS = {"counter": "counter", "histogram": "histogram"}
_KINDS = {**_KEPT_KINDS, "gauge": "gauge_all"}
"""The kinds of metrics with the prefixes of their files. An ended replica keeps only `_KEPT_KINDS`."""
_MAX_CONNECTIONS = 100
_SILENT_SECONDS = 5.0

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, str, str, Labels]
"""A series: the kind, name and description of its metric, and its labels. Each histogram bucket is its own series."""
Values = defaultdict[Key, defaultdict[str, float]]
"""Per series: the value of each sample by name."""


class NodeCollector(Collector):
    """Reads the folder of one node. `node`: the node's cluster address, a label of every series."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._node = node
        self._ended: set[str] = set()
        self._of_ended = _no_values()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, with counters and histograms summed over all replicas of the node."""
        with self._lock:  # each scrape has a thread
            return self._metrics(self._read())

    def _read(self) -> Values:
        values = _no_values()
        for lock in sorted(self._folder.glob(f"*{LOCK_SUFFIX}")):
            replica = lock.name.removesuffix(LOCK_SUFFIX)
            if replica in self._ended:
                continue
            if _is_held(lock):
                self._add(replica, _KINDS, values)
            else:
                self._ended.add(replica)
                self._add(replica, _KEPT_KINDS, self._of_ended)
        for key, samples in self._of_ended.items():
            for name, value in samples.items():
                values[key][name] += value
        return values

    def _add(self, replica: str, kinds: dict[str, str], values: Values) -> None:
        for kind, prefix in kinds.items():
            file = self._folder / f"{prefix}_{replica}.db"
            if file.exists():
                for text, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
                    name, sample, labels, description = _parsed(text)
                    values[kind, name, description, labels][sample] += value

    def _metrics(self, values: Values) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        buckets: dict[str, dict[Labels, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
        for (kind, name, description, labels), samples in sorted(values.items()):
            metric = metrics.setdefault(name, Metric(name, description, kind))
            for sample, value in samples.items():
                if sample == f"{name}_bucket":
                    others = tuple(pair for pair in labels if pair[0] != "le")
                    buckets[name][others][float(dict(labels)["le"])] = value
                else:
                    metric.add_sample(sample, self._labelled(labels), value)
        for name, by_labels in buckets.items():
            for labels, counts in by_labels.items():
                total = 0.0
                for bound in sorted(counts):
                    total += counts[bound]
                    with_bound = self._labelled(labels) | {"le": floatToGoString(bound)}
                    metrics[name].add_sample(f"{name}_bucket", with_bound, total)
                metrics[name].add_sample(f"{name}_count", self._labelled(labels), total)
        yield from metrics.values()

    def _labelled(self, labels: Labels) -> dict[str, str]:
        return {**dict(labels), "node": self._node}


def _no_values() -> Values:
    return defaultdict(lambda: defaultdict(float))


@cache
def _parsed(text: str) -> tuple[str, str, Labels, str]:
    """Returns the names of the metric and of the sample, the labels and the description."""
    name, sample, labels, description = json.loads(text)
    return name, sample, tuple(sorted(labels.items())), description


def _is_held(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per connection. Beyond the limit, a new connection closes the oldest, which is likely idle."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its client has left
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No output: the client was silent for too long, or has left."""


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, *arguments: object) -> None:
        """No output."""


def _serve(collector: Collector, host: str, port: int) -> int:
    """Serves on `port`, or on a free port if it is taken. Returns the port."""
    registry = CollectorRegistry()
    registry.register(collector)
    make = partial(make_server, host, app=make_wsgi_app(registry), handler_class=_Handler)
    kind = _IPv6Server if ":" in host else _Server
    try:
        server = make(port=port, server_class=kind)
    except OSError as error:
        print(f"port {port} for metrics on {host}: {error.strerror}; taking another", file=sys.stderr)
        server = make(port=0, server_class=kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def main() -> None:
    folder, host, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    taken = _serve(NodeCollector(folder, host), host, port)
    new = folder / ".exporter.address.new"
    new.write_text(f"{host}:{taken}")
    os.replace(new, folder / ADDRESS_FILE)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
