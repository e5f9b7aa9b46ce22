"""A client that stops reading its stream: others notice nothing, and little is kept for it."""

import json
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from tests.replicas import replica_pids

NUM_SLOW, NUM_TOKENS = 8, 1800
MOST_BYTES_EACH = 2**20
"""An answer of so many tokens has some 500 kB of events. The ingress may have one copy, and one of its text."""


@contextmanager
def clients_that_do_not_read(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Clients that have asked for long streams, and have room for next to nothing that they do not read."""
    sockets = []
    for number in range(count):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((urlsplit(url).hostname, urlsplit(url).port))
        fields = {"model": "shapes", "prompt": f"Tell {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "temperature": 0})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        one.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
        sockets.append(one)
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


def read_to_the_end(slow: socket.socket) -> bytes:
    slow.settimeout(60)
    return b"".join(iter(lambda: slow.recv(65536), b""))


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def gaps_of_streams(client: OpenAI, seconds: float) -> list[float]:
    """Returns the seconds between the pieces of short streams, one after the other."""
    gaps: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stream = client.completions.create(
            model="shapes", prompt="Hello", stream=True, max_tokens=50, extra_body={"ignore_eos": True}
        )
        last = None
        for _ in stream:
            now = time.perf_counter()
            gaps += [] if last is None else [now - last]
            last = now
    return gaps


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [6.0, 60.0])
def test_others_go_on_and_little_is_kept(client: OpenAI, app_url: str, seconds: float) -> None:
    (ingress,) = replica_pids("Ingress")
    alone = gaps_of_streams(client, seconds / 2)  # warms up, too
    before = memory_bytes(ingress)
    with clients_that_do_not_read(app_url, NUM_SLOW) as slow:
        beside = gaps_of_streams(client, seconds)
        kept = memory_bytes(ingress) - before
        with ThreadPoolExecutor(NUM_SLOW) as pool:
            answers = list(pool.map(read_to_the_end, slow))
    for name, gaps in (("alone", alone), ("beside", beside)):
        p50, p99 = (statistics.quantiles(gaps, n=100)[index] * 1e3 for index in (49, 98))
        print(f"{name}: {len(gaps)} gaps, p50 {p50:.2f} ms, p99 {p99:.1f} ms")
    print(f"the ingress kept {kept / NUM_SLOW / 1e3:.0f} kB for each of {NUM_SLOW}")
    assert kept < NUM_SLOW * MOST_BYTES_EACH
    for answer in answers:
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
