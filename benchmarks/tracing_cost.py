"""What it costs to trace requests: one server with tracing on against the same with tracing off.

    python -m benchmarks.tracing_cost [--rounds 24] [--seconds 20] [--kinds text ...] [--output FILE]

The bundled model on the server's defaults, with a collector of OpenTelemetry configured, which throws away what it
gets. Clients ask one question after the other. `pictures` brings a new small picture with each question, `text` none,
both with answers of 64 tokens. `short text` has answers of four, so that the work beside the model's weighs the most;
the checks leave it out. Clients decide by the header
`traceparent` whether a request is traced, so both ways run on the same processes. Rounds of both take turns, each pair
in the other order than the last one. Measuring begins when a round has lasted longer than spans wait to be sent, which
are five seconds. So as many spans are sent meanwhile as are made, and none of the round before.

`cpu_ms` is the processor time of all replicas for a request, in milliseconds, over all rounds, and `cpu_ratio` that of
traced ones to others. `throughput` is in requests per second, the median of all rounds. A request counts by the share
of its time in which the round was measured. `throughput_ratio` is the median of the ratios of neighbours, because other
work on the machine may spoil a whole round. `cpu_spread` and `throughput_spread` have the quartiles of these ratios.
The collector's own work counts in the throughput, since it runs here, and not in the processor time.

The last line is one JSON document. With the defaults, all takes an hour.
"""

import argparse
import asyncio
import multiprocessing
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc
from PIL import Image

from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.server_process import cpu_seconds
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import APP_NAME, free_port, running_app
from tests.pictures import encoded, user_message
from tests.replicas import worker_pids

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """Of requests: whether they bring a picture, and the tokens of their answers."""

    has_picture: bool
    tokens: int


KINDS = {"pictures": Kind(True, 64), "text": Kind(False, 64), "short text": Kind(False, 4)}
CHECKED = ("pictures", "text")
CLIENTS = 8
MOST_CPU, LEAST_THROUGHPUT = 1.02, 0.98
"""Bounds of both ratios: of what is measured to what goes without it."""
WARM_UP_SECONDS = 5.0
_SEND_SECONDS = 5.0  # OpenTelemetry's default
_LEAD_SECONDS = _SEND_SECONDS + 1.0
_SIDE = 64


class _Sink(grpc.GenericRpcHandler):
    """Answers every call with an empty message, and reads none."""

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


def serve_sink(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Sink()])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


@contextmanager
def sink() -> Iterator[str]:
    """Runs a collector in a process of its own. Yields its URL."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve_sink, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def new_body(kind: Kind, rng: random.Random) -> dict[str, Any]:
    pictures = []
    if kind.has_picture:
        pictures.append(encoded(Image.frombytes("RGB", (_SIDE, _SIDE), rng.randbytes(3 * _SIDE**2)), "JPEG"))
    message = user_message(f"What is it? {rng.random()}", *pictures)
    return {"model": "shapes", "messages": [message], "max_tokens": kind.tokens, "ignore_eos": True}


Interval = tuple[float, float]
"""Two times of `time.perf_counter`."""


async def ask_while(url: str, kind: Kind, work: Awaitable[T], *, is_traced: bool) -> tuple[T, list[Interval]]:
    """Has `CLIENTS` clients ask, who always have a request open until `work` has ended. Returns its result, and when
    each request began and ended."""
    rng, intervals, flag = random.Random(), list[Interval](), "01" if is_traced else "00"
    working = asyncio.ensure_future(work)

    async def ask_forever(session: aiohttp.ClientSession) -> None:
        while not working.done():
            headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag}"}
            body, asked = new_body(kind, rng), time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            intervals.append((asked, time.perf_counter()))

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask_forever(session) for _ in range(CLIENTS)))
    return await working, intervals


@dataclass
class Total:
    """What rounds of one way on the server at `url` took: all `requests`, and in each of the rounds the processor time
    of a request in milliseconds and the requests per second. `cpu` returns the processor seconds of the server so far.
    Of each round the first `lead_seconds` are not measured: `measured_requests`, of which some are parts, took
    `cpu_seconds`."""

    url: str
    cpu: Callable[[], float]
    lead_seconds: float = 0.0
    requests: int = 0
    cpu_seconds: float = 0.0
    measured_requests: float = 0.0
    cpu_ms: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)

    def run(
        self, kind: Kind, seconds: float, *, is_traced: bool = False, beside: Callable[[], object] | None = None
    ) -> None:
        """Measures for so many `seconds`, while `beside` runs once on a thread."""

        async def measure() -> tuple[Interval, float]:
            await asyncio.sleep(self.lead_seconds)
            started, cpu = time.perf_counter(), self.cpu()
            await asyncio.gather(asyncio.sleep(seconds), *([asyncio.to_thread(beside)] if beside else []))
            return (started, time.perf_counter()), self.cpu() - cpu

        (window, cpu), requests = asyncio.run(ask_while(self.url, kind, measure(), is_traced=is_traced))
        number = sum(_share(one, window) for one in requests)
        self.requests += len(requests)
        self.cpu_seconds += cpu
        self.measured_requests += number
        self.cpu_ms.append(cpu / number * 1e3)
        self.throughput.append(number / (window[1] - window[0]))


def _share(one: Interval, window: Interval) -> float:
    """Returns which share of `one` is within the `window`."""
    return max(0.0, min(one[1], window[1]) - max(one[0], window[0])) / (one[1] - one[0])


def compared(ways: dict[str, Total]) -> dict[str, Any]:
    """Returns the figures of two ways, and the ratios of the first to the second."""
    one, other = ways.values()
    return {
        "cpu_ms": {name: round(_all_cpu_ms(way), 3) for name, way in ways.items()},
        "cpu_ratio": round(_all_cpu_ms(one) / _all_cpu_ms(other), 4),
        "cpu_spread": _quartiles(one.cpu_ms, other.cpu_ms),
        "throughput": {name: round(statistics.median(way.throughput), 1) for name, way in ways.items()},
        "throughput_ratio": round(statistics.median(_ratios(one.throughput, other.throughput)), 4),
        "throughput_spread": _quartiles(one.throughput, other.throughput),
        "requests": {name: way.requests for name, way in ways.items()},
    }


def _all_cpu_ms(way: Total) -> float:
    return way.cpu_seconds / way.measured_requests * 1e3


def _quartiles(one: list[float], other: list[float]) -> list[float]:
    ratios = _ratios(one, other)
    return [round(ratio, 3) for ratio in (statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios)]


def _ratios(one: list[float], other: list[float]) -> list[float]:
    return [with_it / without for with_it, without in zip(one, other, strict=True)]


def measure(url: str, kinds: Sequence[str], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns the figures of each kind."""
    found: dict[str, dict[str, Any]] = {}
    pids = worker_pids(f"ServeReplica:{APP_NAME}:")
    for name in kinds:
        kind = KINDS[name]
        asyncio.run(ask_while(url, kind, asyncio.sleep(WARM_UP_SECONDS), is_traced=True))
        ways = {way: Total(url, lambda: sum(map(cpu_seconds, pids)), _LEAD_SECONDS) for way in ("traced", "untraced")}
        for turn in range(rounds):
            for is_traced in (turn % 2 == 0, turn % 2 == 1):
                ways["traced" if is_traced else "untraced"].run(kind, seconds, is_traced=is_traced)
        found[name] = compared(ways)
        print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="of each kind and way (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="default: all of them")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="measured of each round, a multiple of five (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    if options.seconds % _SEND_SECONDS:
        parser.error(f"--seconds {options.seconds}: spans are sent every {_SEND_SECONDS:g} seconds")
    with sink() as collector:
        config = AppConfig.model_validate({"tracing": {"endpoint": collector}})
        with running_app(config, host="127.0.0.1", port=free_port()) as url:
            measured = measure(url, options.kinds, options.rounds, options.seconds)
    checks = {}
    for kind in (one for one in CHECKED if one in measured):
        checks[f"throughput with tracing, {kind}"] = at_least(measured[kind]["throughput_ratio"], LEAST_THROUGHPUT)
        checks[f"processor time with tracing, {kind}"] = at_most(measured[kind]["cpu_ratio"], MOST_CPU)
    document = {"checks": checks, "measured": measured, "machine": this_machine()}
    publish(document, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
