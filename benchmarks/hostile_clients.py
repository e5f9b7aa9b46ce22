"""The server's behaviour under hostile clients, and its attack surface.

    python -m benchmarks.hostile_clients [--output FILE] [--only NAME ...] [--rounds N]

`benchmarks.attacks` has the attacks: large bodies and JSON, slow bodies and headers, endless pictures, bombs, many
pixels, costly grammars, headers that Ray Serve reads, connections of another user, and malformed messages. Each attack
runs for ten seconds in its own process, at low CPU priority, because real attackers have their own machines. Other
processes request the health fifty times a second, and continuously stream answers about a small picture and a text. All
attacks take turns for several rounds. Each time is the median of its rounds, because the machine often causes the
slowest of some hundred answers. A control client shows the machine's part: it sends its JSON to a server that only
reads.

Afterwards the benchmark lists the server's listening ports, and its sockets that another user of the machine can reach.
The last line is one JSON document.
"""

import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from PIL import Image

from benchmarks.attacks import ATTACKS, CHAT, CONTROL, Attack, Target
from benchmarks.document import at_most, make_parser, publish, this_machine
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import APP_NAME, running_app
from tests.listening import listeners, sockets_open_to_nobody, undocumented
from tests.pictures import encoded, user_message
from tests.replicas import proxy_pids, replica_pids

if TYPE_CHECKING:
    # Not at run time: the import of Ray reads the environment, and a server on one machine sets it first.
    from raylens.deployments.wire.private_port import PortAddress

SECONDS = 10.0
TARGET_SECONDS = 0.1
# This attack takes every connection; a new client waits until one is dropped.
TARGETS = {"4200 half headers": 1.0}
MAX_GROWTH_MB = 1500.0
NUM_NEIGHBOUR_TOKENS = 64
SHARD = "Shared-0"
MAX_DESCRIPTORS = 2000
"""Of a process, while others open connections to it: a tenth of its limit where 20,000 files may be open."""
MOST = ("growth_mb", "preprocess_growth_mb", "most_descriptors")
"""Figures whose maximum over the rounds counts."""


def ask_for_health(url: str, started: Event, stop: Event, times: Any) -> None:
    started.set()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    while not stop.wait(0.02):
        asked_at = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        times.append(time.perf_counter() - asked_at if response.status == 200 else 30.0)


def ask_as_a_neighbour(url: str, started: Event, stop: Event, times: Any) -> None:
    """Measures seconds of whole streamed answers, each about another small picture."""
    started.set()
    while not stop.wait(0.1):
        message = user_message("Hello", encoded(Image.effect_noise((96, 96), 50).convert("RGB")))
        body = {"model": "shapes", "messages": [message], "stream": True}
        body |= {"max_tokens": NUM_NEIGHBOUR_TOKENS, "ignore_eos": True}
        asked_at = time.perf_counter()
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
            connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            is_whole = response.read().rstrip().endswith(b"[DONE]")
        times.append(time.perf_counter() - asked_at if is_whole else 60.0)


class _Host(BaseHTTPRequestHandler):
    """Sends a picture at one byte per second, and only reads the requests of the control client."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"x")
                time.sleep(1)

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        while left > 0 and (piece := self.rfile.read1(min(left, 2**18))):
            left -= len(piece)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """No output."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 256


def running_host() -> str:
    """Returns the URL of a `_Host` in this process."""
    server = _Server(("127.0.0.1", 0), _Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def by_process(pids: Iterable[int], figure: Callable[[Path], float]) -> dict[int, float]:
    """Returns a figure of each process's folder in /proc, without ended ones, such as replicas that were scaled
    down."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = figure(Path(f"/proc/{pid}"))
    return found


def resident_megabytes(pids: Iterable[int]) -> dict[int, float]:
    return by_process(pids, lambda folder: int((folder / "statm").read_text().split()[1]) * 4096 / 1e6)


def num_descriptors(folder: Path) -> int:
    return len(list((folder / "fd").iterdir()))


def growth_megabytes(before: dict[int, float]) -> float:
    """Returns the growth of the processes that still run."""
    return sum(megabytes - before[pid] for pid, megabytes in resident_megabytes(before).items())


def speaking_ports() -> tuple[list[int], list[int]]:
    """Returns the ports of replicas that send first: Raylens' private ports, with a challenge, and Ray's gRPC ports,
    with a frame of another length."""
    from raylens.deployments.wire.private_port import NONCE_BYTES

    ours, rays = list[int](), list[int]()
    for listener in listeners(os.getpid()):
        if listener.process.startswith("ray::ServeReplica:") and listener.address == "loopback":
            with suppress(OSError), socket.create_connection(("127.0.0.1", listener.port), timeout=1) as connection:
                if said := connection.recv(1024):
                    (ours if len(said) == NONCE_BYTES else rays).append(listener.port)
    return ours, rays


def shard_address() -> "PortAddress":
    """Returns the address and the token of the shard of this process's server."""
    from ray import serve

    handle: Any = serve.get_deployment_handle(SHARD, APP_NAME)
    found: PortAddress = handle.address.remote().result()
    return found


def _attack_politely(attack: Attack, target: Target, started: Event, stop: Event) -> None:
    started.set()  # after its imports
    os.nice(19)
    attack(target, stop)


def measure(url: str, target: Target, attack: Attack | None) -> dict[str, float]:
    """Returns the seconds of health and neighbour answers of the server at `url`; the largest memory growth of the
    endpoint's processes, and the final growth of Preprocess, in MB; and the most descriptors of an ingress or shard
    process."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        stop, healths, answers = context.Event(), manager.list(), manager.list()
        front = resident_megabytes([*replica_pids("Ingress"), *proxy_pids()])
        preprocess = resident_megabytes(replica_pids("Preprocess"))
        listening = [*replica_pids("Ingress"), *replica_pids(SHARD)]
        growth = descriptors = 0.0

        def start(target: Any, *arguments: Any) -> Any:
            started = context.Event()
            process = context.Process(target=target, args=(*arguments[:-1], started, *arguments[-1]), daemon=True)
            process.start()
            started.wait()
            return process

        attacking = None if attack is None else start(_attack_politely, attack, target, (stop,))
        # The neighbour first: its process's startup takes a core for seconds.
        asking = [start(ask_as_a_neighbour, url, (stop, answers)), start(ask_for_health, url, (stop, healths))]
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            growth = max(growth, growth_megabytes(front))
            descriptors = max(descriptors, *by_process(listening, num_descriptors).values())
            time.sleep(0.05)
        stop.set()
        for process in asking:
            process.join(90)
        if attacking is not None:
            attacking.kill()
        time.sleep(5)
        ordered, neighbours = sorted(healths), sorted(answers)
    return {
        "asked": len(ordered),
        "median_seconds": round(ordered[len(ordered) // 2], 4),
        "p99_seconds": round(ordered[len(ordered) * 99 // 100], 4),
        "slowest_seconds": round(ordered[-1], 4),
        "neighbour_median_seconds": round(neighbours[len(neighbours) // 2], 3),
        "neighbour_slowest_seconds": round(neighbours[-1], 3),
        "most_descriptors": descriptors,
        "growth_mb": round(growth, 1),
        "preprocess_growth_mb": round(growth_megabytes(preprocess), 1),
    }


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the median of each time, the slowest answer of every round, and the maximum of each growth: processes
    keep memory, so later rounds show less growth."""
    found: dict[str, Any] = {}
    for figure in rounds[0]:
        of_rounds = [one[figure] for one in rounds]
        found[figure] = max(of_rounds) if figure in MOST else round(statistics.median(of_rounds), 4)
    return found | {"slowest_of_rounds": [one["slowest_seconds"] for one in rounds]}


def _checks(name: str, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"health, {name}": at_most(found["slowest_seconds"], TARGETS.get(name, TARGET_SECONDS)),
        f"memory, {name}": at_most(found["growth_mb"], MAX_GROWTH_MB),
        f"descriptors, {name}": at_most(found["most_descriptors"], MAX_DESCRIPTORS),
    }


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), help="which attacks")
    args = parser.parse_args()
    config = AppConfig.model_validate(
        {"model": str(BUNDLED_MODEL), "media": {"fetch": {"allow_private_addresses": True}}}
    )
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    checks: dict[str, dict[str, Any]] = {}
    with running_app(config, host="127.0.0.1", port=free_port(), say=lambda line: print(line, file=sys.stderr)) as url:
        host = running_host()
        target = Target(url, f"{host}/picture.png", *speaking_ports(), shard_address())
        control = replace(target, url=host)
        for name in args.only * args.rounds:
            rounds[name].append(measure(url, control if name == CONTROL else target, ATTACKS[name]))
            print(f"{name}: {rounds[name][-1]}", flush=True)
        if os.geteuid() == 0:
            ports = [f"{one.process} at {one.address}:{one.port}" for one in undocumented(listeners(os.getpid()))]
            sockets = sockets_open_to_nobody()
            checks["listening beside what is documented"] = {"value": ports, "ok": not ports}
            checks["sockets that another user reaches"] = {"value": sockets, "ok": not sockets}
    measured = {name: summary(found) for name, found in rounds.items()}
    for name, found in measured.items():
        if name != CONTROL:
            checks |= _checks(name, found)
    publish({"machine": this_machine(), "measured": measured, "checks": checks}, args.output)


if __name__ == "__main__":
    main()
