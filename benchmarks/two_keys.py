"""One API key's short texts beside heavy loads of another key: what do they wait, and what does the server hold?

    python -m benchmarks.two_keys [--seconds 30] [--only NAME ...] [--output FILE]

Clients of key A stream short texts, one after the other: alone, then beside each load of key B. B's loads are 64
clients that each send two new JPEGs of 12 megapixels, and 64 or 200 clients that each ask for 16 answers with 20
log-probabilities a token. B's clients are a process of the lowest priority, for they stand for other machines. The
server has its default settings and the bundled model.

TTFT is the time from a request to its first text, ITL the time between two pieces of text. Memory is the proportional
set size of all processes of the server, the most of some samples that are taken when the times have been measured and
the load goes on: a sample stops each process that it looks at for milliseconds. The last line is one JSON document.
"""

import argparse
import asyncio
import base64
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks.document import at_most, publish, this_machine
from benchmarks.preprocess import photograph
from benchmarks.server_process import tree_of
from benchmarks.streaming_client import StreamedAnswer, ask
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import free_port, running_app

MODEL = "shapes"
KEYS = {"A": "rl-key-of-a", "B": "rl-key-of-b"}
NUM_TEXTS, TEXT_TOKENS = 2, 48
SETTLE_SECONDS = 3.0
MEMORY_SECONDS, SAMPLE_SECONDS = 10.0, 1.0
TTFT_TARGET, ITL_TARGET, MEMORY_TARGET = 5.0, 3.0, 1.5

Bodies = Callable[[], Iterator[bytes]]
_numbers = itertools.count()


def pictures() -> Iterator[bytes]:
    """Yields bodies with two JPEGs of 4000 x 3000 pixels that no other body has: a decoder ignores what follows the
    end."""
    photo = photograph(4000, 3000)
    start = base64.b64encode(photo + b" " * (-len(photo) % 3))
    while True:
        urls = [start + base64.b64encode(f"{next(_numbers):012}".encode()) for _ in range(2)]
        parts = b"".join(
            b'{"type":"image_url","image_url":{"url":"data:image/jpeg;base64,' + url + b'"}},' for url in urls
        )
        yield (
            b'{"model":"shapes","stream":true,"max_tokens":8,"messages":[{"role":"user","content":['
            + parts
            + b'{"type":"text","text":"What is there?"}]}]}'
        )


def answers() -> Iterator[bytes]:
    """Yields bodies that ask for 16 streamed answers of 128 tokens, each token with 20 log-probabilities."""
    while True:
        question = f"Number {next(_numbers)}: what is there, what is not, and what else may there be?"
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True}
        yield json.dumps(
            body | {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 128, "ignore_eos": True}
        ).encode()


LOADS: dict[str, tuple[int, Bodies]] = {
    "pictures": (64, pictures),
    "64 x 16 answers": (64, answers),
    "200 x 16 answers": (200, answers),
}


def send_load(url: str, num_clients: int, bodies: Bodies, begun: Event, over: Event, ended: Any) -> None:
    """Runs B's clients until `over`, and puts how many requests ended with each status into `ended`."""
    os.nice(19)
    to, made = urlsplit(url), itertools.chain([next(bodies())], bodies())

    async def client(statuses: Counter[str]) -> None:
        while not over.is_set():
            reader, writer = await asyncio.open_connection(to.hostname, to.port)
            try:
                statuses[await exchange(reader, writer, next(made))] += 1
            except OSError:
                statuses["cut"] += 1
            finally:
                writer.close()

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> str:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {to.netloc}\r\nConnection: close\r\n"
            f"Authorization: Bearer {KEYS['B']}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = (await reader.readline()).split(b" ")[1:2]
        while await reader.read(2**18):
            pass
        if status == [b"429"]:
            await asyncio.sleep(1.0)
        return status[0].decode() if status else "cut"

    async def run() -> None:
        statuses = Counter[str]()
        clients = [asyncio.create_task(client(statuses)) for _ in range(num_clients)]
        begun.set()
        while not over.is_set():
            await asyncio.sleep(0.1)
        for one in clients:
            one.cancel()
        ended.put(dict(statuses))

    asyncio.run(run())


@contextmanager
def load_of_b(url: str, num_clients: int, bodies: Bodies, statuses: dict[str, int]) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    begun, over, ended = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=send_load, args=(url, num_clients, bodies, begun, over, ended))
    process.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        statuses.update(ended.get())
        process.join()


class Memory:
    """The most memory that this process's children and theirs take together while the block runs, in bytes."""

    def __enter__(self) -> "Memory":
        self.most = 0
        self._over = threading.Event()
        self._own = {os.getpid()}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            loads = {child.pid for child in multiprocessing.active_children()}
            self.most = max(self.most, sum(map(_set_size, set(tree_of(os.getpid())) - self._own - loads)))


def _set_size(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def texts_of_a(url: str, seconds: float) -> dict[str, Any]:
    """Returns the figures of A's clients, which go on for `seconds`. A request that fails counts as refused."""
    over = time.monotonic() + seconds
    answered, refused = list[StreamedAnswer](), list[str]()

    def client() -> None:
        while time.monotonic() < over:
            question = f"Number {next(_numbers)}: what is there?"
            try:
                content = [{"type": "text", "text": question}]
                answered.append(ask(url, MODEL, content, TEXT_TOKENS, api_key=KEYS["A"]))
            except (RuntimeError, OSError) as error:
                refused.append(str(error)[:200])

    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        for one in [pool.submit(client) for _ in range(NUM_TEXTS)]:
            one.result()
    gaps = [gap * 1e3 for answer in answered for gap in answer.gaps]
    firsts = [answer.first * 1e3 for answer in answered]
    figures = {"answers": len(answered), "refused": refused}
    for name, values in (("ttft_ms", firsts), ("itl_ms", gaps)):
        for percent in (50, 99):
            found = statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else None
            figures[f"{name}_p{percent}"] = found
    return figures


def measure(url: str, seconds: float, load: tuple[int, Bodies] | None) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    with nullcontext() if load is None else load_of_b(url, *load, statuses):
        time.sleep(SETTLE_SECONDS)
        figures = texts_of_a(url, seconds)
        with Memory() as memory:
            texts_of_a(url, MEMORY_SECONDS)
    return {**figures, "memory_mb": memory.most / 1e6, "statuses_of_b": statuses}


def settings(folder: Path) -> AppConfig:
    keys = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in KEYS.items()]
    (folder / "keys.yaml").write_text(yaml.safe_dump(keys))
    return AppConfig.model_validate({"model": str(BUNDLED_MODEL), "auth": {"keys_file": str(folder / "keys.yaml")}})


def checks(alone: dict[str, Any], beside: dict[str, Any], cache_mb: float) -> dict[str, Any]:
    def ratio(name: str) -> float:
        return float("inf") if beside[name] is None else beside[name] / alone[name]

    return {
        "ttft_p99": at_most(ratio("ttft_ms_p99"), TTFT_TARGET),
        "itl_p99": at_most(ratio("itl_ms_p99"), ITL_TARGET),
        "refused": at_most(len(beside["refused"]), 0),
        "memory": at_most(beside["memory_mb"] / (alone["memory_mb"] * MEMORY_TARGET + cache_mb), 1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--only", nargs="*", choices=LOADS, default=list(LOADS), help="B's loads to run")
    parser.add_argument("--output", type=Path, help="file to write the JSON document to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder))
        with running_app(config, host="127.0.0.1", port=free_port()) as url:
            texts_of_a(url, 3.0)  # warms up
            alone = measure(url, options.seconds, None)
            print("alone", alone, flush=True)
            beside = {}
            for name in options.only:
                beside[name] = measure(url, options.seconds, LOADS[name])
                print(name, beside[name], flush=True)
                time.sleep(SETTLE_SECONDS)
    cache_mb = (config.shared.processor_cache_bytes + config.shared.embedding_cache_bytes) / 1e6
    found = {name: checks(alone, figures, cache_mb) for name, figures in beside.items()}
    machine = this_machine(seconds=options.seconds)
    publish({"machine": machine, "alone": alone, "beside": beside, "checks": found}, options.output)
    sys.exit(not all(check["ok"] for one in found.values() for check in one.values()))


if __name__ == "__main__":
    main()
