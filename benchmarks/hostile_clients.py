"""How long `/health` takes, and what memory grows to, while clients send what they should not.

    python -m benchmarks.hostile_clients [--output FILE]

The attacks: bodies of 100 MB, in one piece and chunked; bodies that trickle in; pictures from hosts that never finish;
bombs (a picture of 50,000 x 50,000 pixels in a few bytes); 4K pictures as fast as they are taken. Each lasts ten
seconds, from a process of its own, which leaves the CPU to others where it can, for attackers have machines of their
own; another process asks for the health fifty times a second. The last line is one JSON document.
"""

import argparse
import base64
import http.client
import io
import multiprocessing
import os
import platform
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from PIL import Image

from benchmarks.document import publish
from deployments.config import AppConfig
from deployments.local_cluster import free_port, running_app
from tests.replicas import proxy_pids, replica_pids

SHAPES = Path(__file__).parent.parent / "checkpoints" / "shapes"
SECONDS = 10.0
TARGET_SECONDS = 0.1
MAX_GROWTH_MB = 1500.0
CHAT = "/v1/chat/completions"

Attack = Callable[[str, str, Event], None]


def large_bodies(url: str, media_url: str, stop: Event) -> None:
    body = b"x" * (100 * 2**20)
    while not stop.is_set():
        for content in (body, iter([body[: 2**20]] * 100)):
            try:
                httpx.post(url + CHAT, content=content, timeout=30)
            except httpx.TransportError:
                continue  # closed before all was sent


def trickling_bodies(url: str, media_url: str, stop: Event) -> None:
    to = urlsplit(url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    connections = [socket.create_connection((to.hostname or "", to.port or 80)) for _ in range(64)]
    for connection in connections:
        connection.sendall(head.encode())
    while not stop.wait(0.2):
        for connection in connections:
            connection.send(b" ")


def slow_media(url: str, media_url: str, stop: Event) -> None:
    _ask_at_once(url, lambda: {"type": "image_url", "image_url": {"url": media_url}}, stop, number=32)


def bombs(url: str, media_url: str, stop: Event) -> None:
    header = b"IHDR" + (50_000).to_bytes(4) * 2 + b"\x08\x02\0\0\0"
    png = b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + zlib.crc32(header).to_bytes(4)
    pixels = b"IDAT" + zlib.compress(bytes(50_000_000))
    png += (len(pixels) - 4).to_bytes(4) + pixels + zlib.crc32(pixels).to_bytes(4)
    _ask_at_once(url, lambda: _picture_part(png), stop, number=8)


def large_pictures(url: str, media_url: str, stop: Event) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((3840, 2160), 50).convert("RGB").save(buffer, "JPEG")
    # What stands behind a JPEG's end is no part of the picture, and yet makes it another one to every cache.
    _ask_at_once(url, lambda: _picture_part(buffer.getvalue() + os.urandom(8)), stop, number=8)


ATTACKS: dict[str, Attack | None] = {
    "nothing": None,
    "bodies of 100 MB": large_bodies,
    "bodies that trickle in": trickling_bodies,
    "media that never end": slow_media,
    "bombs": bombs,
    "4K pictures": large_pictures,
}


def _picture_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def _ask_at_once(url: str, part: Callable[[], dict[str, Any]], stop: Event, number: int) -> None:
    """So many clients, each with one request after the other."""

    def run() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                body = {"model": "shapes", "messages": [{"role": "user", "content": [part()]}], "max_tokens": 4}
                client.post(url + CHAT, json=body)

    for _ in range(number):
        threading.Thread(target=run, daemon=True).start()
    stop.wait()


def ask_for_health(url: str, started: Event, stop: Event, times: Any) -> None:
    started.set()
    to = urlsplit(url)
    connection = http.client.HTTPConnection(to.hostname or "", to.port, timeout=30)
    while not stop.wait(0.02):
        asked_at = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        times.append(time.perf_counter() - asked_at if response.status == 200 else 30.0)


def endless_host() -> str:
    """The URL of a picture of which a byte comes each second, on a server in this process."""
    server = socket.create_server(("127.0.0.1", 0), backlog=256)

    def drip(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(1)
        except OSError:
            connection.close()

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/picture.png"


def resident_bytes() -> int:
    """Of the processes that speak HTTP and that have the routes."""
    pids = [*replica_pids("Ingress"), *proxy_pids()]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


def _attack_politely(attack: Attack, url: str, media_url: str, started: Event, stop: Event) -> None:
    started.set()  # with its imports behind it
    os.nice(19)
    attack(url, media_url, stop)


def measure(url: str, media_url: str, attack: Attack | None) -> dict[str, float]:
    """Seconds of the health's answers, and megabytes by which the endpoint's processes have grown at most."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        times, started, stop = manager.list(), context.Event(), context.Event()
        before = most = resident_bytes()
        attacking = None
        if attack is not None:
            arguments = (attack, url, media_url, started, stop)
            attacking = context.Process(target=_attack_politely, args=arguments, daemon=True)
            attacking.start()
            started.wait()
        started.clear()
        asking = context.Process(target=ask_for_health, args=(url, started, stop, times), daemon=True)
        asking.start()
        started.wait()
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            most = max(most, resident_bytes())
            time.sleep(0.05)
        stop.set()
        asking.join(60)
        if attacking is not None:
            attacking.kill()
        ordered = sorted(times)
    return {
        "asked": len(ordered),
        "median_seconds": round(ordered[len(ordered) // 2], 4),
        "p99_seconds": round(ordered[len(ordered) * 99 // 100], 4),
        "slowest_seconds": round(ordered[-1], 4),
        "growth_mb": round((most - before) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the document to this file")
    args = parser.parse_args()
    config = AppConfig.model_validate({"model": str(SHAPES), "media": {"allow_private_addresses": True}})
    measured = {}
    with running_app(config, host="127.0.0.1", port=free_port(), say=lambda line: print(line, file=sys.stderr)) as url:
        media_url = endless_host()
        for name, attack in ATTACKS.items():
            measured[name] = measure(url, media_url, attack)
            print(f"{name}: {measured[name]}", flush=True)
            time.sleep(5)
    checks: dict[str, dict[str, Any]] = {}
    for name, found in measured.items():
        slowest, growth = found["slowest_seconds"], found["growth_mb"]
        checks[f"health, {name}"] = {"value": slowest, "target": TARGET_SECONDS, "ok": slowest < TARGET_SECONDS}
        checks[f"memory, {name}"] = {
            "value": growth,
            "target": MAX_GROWTH_MB,
            "ok": growth < MAX_GROWTH_MB,
        }
    machine = f"{platform.machine()}, {multiprocessing.cpu_count()} CPUs"
    publish({"machine": machine, "measured": measured, "checks": checks}, args.output)


if __name__ == "__main__":
    main()
