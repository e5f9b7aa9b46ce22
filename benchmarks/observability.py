"""What it costs to trace requests: the throughput of one server with tracing on against that with tracing off.

    python -m benchmarks.observability [--rounds 6] [--seconds 4] [--output FILE]

The bundled model on the server's defaults, with a collector of OpenTelemetry configured, which throws away what it
gets. Clients ask one question after the other, with answers of few tokens, so that the work beside the model's weighs
the most: `pictures` brings a new small picture with each question, `text` none. They decide by the header
`traceparent` whether a request is traced, so both ways run on the same processes. Rounds of both take turns, each with
the order of the last one turned round. A ratio is that of a round with tracing to its neighbour without; the figure is
the median of all. The spread of ratios tells how good it is. The collector runs on the same machine, and its work
counts as a cost here.

`record_us` is the time in which an ingress makes the record of a request for `raylens trace`, in microseconds. The
check has it as a share of a core at the highest throughput that was seen. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from PIL import Image

from benchmarks.document import at_least, at_most, publish, this_machine
from deployments.config import AppConfig
from deployments.endpoint.request_traces import as_json
from deployments.local_cluster import free_port, running_app
from preprocess.schema import StageTime
from tests.pictures import encoded, user_message

KINDS = ("pictures", "text")
CLIENTS, TOKENS = 8, 4
TARGET = 0.98
_SIDE = 64
_NUM_SPANS = 16  # of a request with one picture


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


def new_body(kind: str, rng: random.Random) -> dict[str, Any]:
    pictures = []
    if kind == "pictures":
        pictures.append(encoded(Image.frombytes("RGB", (_SIDE, _SIDE), rng.randbytes(3 * _SIDE**2)), "JPEG"))
    message = user_message(f"What is it? {rng.random()}", *pictures)
    return {"model": "shapes", "messages": [message], "max_tokens": TOKENS, "ignore_eos": True}


async def requests_per_second(url: str, kind: str, seconds: float, *, is_traced: bool) -> float:
    """Returns the throughput of `CLIENTS` clients that always have one request open."""
    rng, num_done = random.Random(), 0
    flag = "01" if is_traced else "00"
    deadline = time.perf_counter() + seconds

    async def ask_forever(session: aiohttp.ClientSession) -> None:
        nonlocal num_done
        while time.perf_counter() < deadline:
            headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag}"}
            body = new_body(kind, rng)
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            num_done += 1

    started = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask_forever(session) for _ in range(CLIENTS)))
    return num_done / (time.perf_counter() - started)


def measure(url: str, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns the requests per second of each kind, traced and not, and the ratios of neighbours."""
    found: dict[str, dict[str, Any]] = {kind: {"traced": [], "untraced": []} for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS:
            for is_traced in (turn % 2 == 0, turn % 2 == 1):
                rate = asyncio.run(requests_per_second(url, kind, seconds, is_traced=is_traced))
                if turn > 0:  # the first round warms up
                    found[kind]["traced" if is_traced else "untraced"].append(round(rate, 1))
    for own in found.values():
        ratios = [on / off for on, off in zip(own["traced"], own["untraced"], strict=True)]
        own["ratios"] = [round(one, 3) for one in ratios]
        own["ratio"] = round(statistics.median(ratios), 4)
    return found


def record_us() -> float:
    """Returns the time of what `TracedRequest.keep` does beside sending."""
    one = StageTime("media_decode", time.time(), 0.0123, "Preprocess#abcdefgh", "messages[0].content[0]")
    return _best_us(lambda: json.dumps({"spans": as_json([one] * _NUM_SPANS)}).encode())


def _best_us(work: Callable[[], object], number: int = 2000) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(number):
            work()
        best = min(best, (time.perf_counter() - started) / number)
    return best * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    record = record_us()
    with sink() as collector:
        config = AppConfig.model_validate({"tracing": {"endpoint": collector}})
        with running_app(config, host="127.0.0.1", port=free_port()) as url:
            measured = measure(url, options.rounds, options.seconds)
    fastest = max(statistics.median(own["untraced"]) for own in measured.values())
    share = record * 1e-6 * fastest  # of one core, and so of an ingress that would do nothing else
    for kind, own in measured.items():
        print(f"{kind}: {own}")
    checks = {f"throughput with tracing, {kind}": at_least(own["ratio"], TARGET) for kind, own in measured.items()}
    checks["share of a core that records take"] = at_most(round(share, 4), 0.01)
    document = {"checks": checks, "measured": measured, "record_us": round(record, 1), "machine": this_machine()}
    publish(document, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
