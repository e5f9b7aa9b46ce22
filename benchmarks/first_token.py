"""Divides the time to first token into computation and transport between processes, and its processor time by process.

    python -m benchmarks.first_token [--rounds 6] [--output FILE]

The model is a LLaVA of random weights with 40 million parameters in its language half, with the server's defaults. One
client asks one question after the other, each with an answer of one token. `unique` sends a new picture of 1024 x 768
pixels with each question, `repeated` the same picture with other questions, and `text` none. The kinds take turns. The
client rests before each request, so that the server's work after an answer is over. Figures are medians of all
requests, in milliseconds.

The parts are those of docs/metrics.md, as the answer reports them. `computation` is the critical path of computing
parts: `media_fetch`, `media_decode`, `processor`, then the longer of `render` and `encode`, which run in parallel, then
`prefill`. The rest of the TTFT is `transport`: calls between processes, thread switches, queues, and HTTP. `http` is
the part of it outside the ingress, which counts from the request's arrival to its first token. `transport_trips` is
transport in bare round trips of an actor.

A prompt has few tokens in front of its picture, so it does not start before the picture is encoded. The wait for the
encoder is in `llm_queue`, not in `prefill`. No queue time counts as computation.

Bare round trips are measured in the same cluster: from a replica of Ray Serve to an async method of an actor that
returns 1 KB, the same to a method of a deployment through its handle, and from this process by HTTP through HAProxy to
the ingress's `/ping`.

`processor_ms` is the processor time of a request in each process, without its work at rest. It is the budget of a
request in docs/architecture.md. The last line is one JSON document.
"""

import http.client
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from benchmarks.document import at_most, make_parser, publish, this_machine
from benchmarks.pictures import new_content
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import cpu_seconds
from benchmarks.streaming_client import Answer, ask
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import LOGGING, running_app
from raylens.deployments.metrics.waterfall_stages import WATERFALL
from tests.replicas import replica_pids

MODEL = "random"
KINDS = ("unique", "repeated", "text")
PARTS = WATERFALL[: WATERFALL.index("prefill") + 1]
"""The stages before the first token, by their names in `stage_timings`."""
TARGETS = {"unique": 20.0, "text": 8.0}
"""Maximum milliseconds of transport."""
REQUESTS, TRIPS = 12, 50
"""Per round: requests of each kind, and bare round trips of each kind."""
PROCESSES = ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")
_REST_SECONDS = 0.03
_IDLE_SECONDS = 5.0

Figures = dict[str, float]


class Empty:
    """The receiver of a bare round trip."""

    async def reply(self) -> bytes:
        return bytes(1024)


class Caller:
    """Makes bare round trips from the event loop of a replica, like the ingress's calls."""

    def __init__(self, deployment: DeploymentHandle[Any]) -> None:
        self._deployment = deployment
        self._actor = ray.remote(num_cpus=0)(Empty).remote()

    async def trips(self, count: int) -> dict[str, list[float]]:
        """Returns the seconds of each trip."""
        calls: dict[str, Callable[[], Any]] = {
            "actor": self._actor.reply.remote,
            "serve_handle": self._deployment.reply.remote,
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(count):
            for name, call in calls.items():
                started = time.perf_counter()
                await call()
                times[name].append(time.perf_counter() - started)
        return times


def start_caller() -> DeploymentHandle[Any]:
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}}
    caller = serve.deployment(Caller, **options).bind(serve.deployment(Empty, **options).bind())
    return serve.run(caller, name="bare", route_prefix=None, logging_config=LOGGING)


def ping(url: str) -> float:
    """Returns the seconds of a request on a new connection."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/ping")
    connection.getresponse().read()
    connection.close()
    return time.perf_counter() - started


def ask_rested(url: str, kind: str) -> Answer:
    content = new_content(kind)
    time.sleep(_REST_SECONDS)
    return ask(url, MODEL, content, 1, stage_timings=True)


def figures_of(answer: Answer) -> Figures:
    """Returns the parts of one TTFT, in milliseconds."""
    seconds = answer.timings["seconds"]
    parts = {name: seconds[name] * 1e3 for name in PARTS if name in seconds}
    side_by_side = max(parts["render"], parts.get("encode", 0.0))
    in_a_row = sum(parts.get(name, 0.0) for name in ("media_fetch", "media_decode", "processor", "prefill"))
    ttft = answer.ttft * 1e3
    return {
        "ttft": ttft,
        **parts,
        "computation": side_by_side + in_a_row,
        "transport": ttft - side_by_side - in_a_row,
        "http": ttft - answer.timings["time_to_first_token"] * 1e3,
    }


class Processors:
    """The processor time of each process, in milliseconds, without its work at rest."""

    def __init__(self) -> None:
        self._pids = {name: replica_pids(name)[0] for name in PROCESSES}
        self._idle = dict.fromkeys(PROCESSES, 0.0)
        begin = self.read()
        time.sleep(_IDLE_SECONDS)
        self._idle = {name: (now - begin[name]) / _IDLE_SECONDS for name, now in self.read().items()}

    def read(self) -> Figures:
        """Returns the time so far. Only differences have a meaning."""
        now = time.monotonic()
        return {name: cpu_seconds(pid) * 1e3 - self._idle[name] * now for name, pid in self._pids.items()}


def measure(url: str, rounds: int) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """Returns the medians of each kind, and of the bare round trips as `bare`; and each kind's processor time."""
    caller, processors = start_caller(), Processors()
    processor_ms: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    answers: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    trips: dict[str, list[float]] = {"actor": [], "serve_handle": [], "http": []}
    for turn in range(rounds + 1):
        for kind in sorted(KINDS, reverse=turn % 2 == 1):
            begin = processors.read()
            asked = [ask_rested(url, kind) for _ in range(REQUESTS)]
            if turn > 0:  # the first round warms up
                answers[kind] += [figures_of(one) for one in asked]
                spent = processors.read()
                processor_ms[kind].append({name: (spent[name] - begin[name]) / REQUESTS for name in PROCESSES})
        bare = {**caller.trips.remote(TRIPS).result(), "http": [ping(url) for _ in range(TRIPS)]}
        if turn > 0:
            for name, seconds in bare.items():
                trips[name] += seconds
    medians = medians_of(answers)
    medians["bare"] = {name: statistics.median(seconds) * 1e3 for name, seconds in trips.items()}
    for kind in KINDS:
        medians[kind]["transport_trips"] = medians[kind]["transport"] / medians["bare"]["actor"]
    return medians, medians_of(processor_ms)


def medians_of(figures: dict[str, list[Figures]]) -> dict[str, Figures]:
    return {
        kind: {name: statistics.median(one[name] for one in own) for name in own[0]} for kind, own in figures.items()
    }


def main() -> None:
    options = make_parser(__doc__, rounds=6).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        config = AppConfig(model=folder, served_model_name=MODEL)
        with running_app(config, host="127.0.0.1", port=free_port()) as url:
            measured, processor_ms = (rounded(figures) for figures in measure(url, options.rounds))
    for kind, own in measured.items():
        print(f"{kind}: {own}, {processor_ms.get(kind, '')}")
    checks = {
        f"transport, {kind}, ms": at_most(measured[kind]["transport"], target) for kind, target in TARGETS.items()
    }
    document = {"checks": checks, "measured_ms": measured, "processor_ms": processor_ms, "machine": this_machine()}
    publish(document, options.output)


def rounded(figures: dict[str, Figures]) -> dict[str, Figures]:
    return {kind: {name: round(value, 2) for name, value in own.items()} for kind, own in figures.items()}


if __name__ == "__main__":
    main()
