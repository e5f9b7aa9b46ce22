"""Attacks of hostile clients. Each runs until its `stop` event is set."""

import asyncio
import itertools
import json
import os
import random
import resource
import socket
import string
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from PIL import Image

from raylens.deployments.launch.demo import picture_part
from tests.listening import become_nobody
from tests.pictures import encoded

if TYPE_CHECKING:
    # Not at run time: the import of Ray reads the environment, and a server on one machine sets it first.
    from raylens.deployments.wire.private_port import PortAddress

CHAT = "/v1/chat/completions"
NUM_SLOW_HEADERS = 4200

_OF_RAY_SERVE = (b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"x-session-id", b"x-request-id")


@dataclass(frozen=True)
class Target:
    """`url`: the server's. `media_url`: a picture that never ends. `private_ports`: ports with Raylens' token proof.
    `ray_ports`: Ray's gRPC ports. `shard`: one private port with its token."""

    url: str
    media_url: str
    private_ports: Sequence[int] = ()
    ray_ports: Sequence[int] = ()
    shard: "PortAddress | None" = None


Attack = Callable[[Target, Event], None]


def large_bodies(target: Target, stop: Event) -> None:
    body = b"x" * (100 * 2**20)
    while not stop.is_set():
        for content in (body, iter([body[: 2**20]] * 100)):
            with suppress(httpx.TransportError):  # closed before the whole body was sent
                httpx.post(target.url + CHAT, content=content, timeout=30)


def json_bodies(target: Target, stop: Event) -> None:
    bodies = [_body(_noise_parts(megabytes)) for megabytes in (20, 60, 101)]
    bodies.append(_body([{"type": "text", "text": "a"}] * 400_000))
    _post_at_once(target.url, [lambda body=body: body for body in bodies], stop)  # type: ignore[misc]


def trickling_bodies(target: Target, stop: Event) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    connections = [_connect(target.url) for _ in range(64)]
    for connection in connections:
        connection.sendall(head.encode())
    while not stop.wait(0.2):
        for connection in connections:
            connection.send(b" ")


def slow_headers(target: Target, stop: Event) -> None:
    """Holds many connections with half a header, and replaces closed ones."""
    connections = [_half_header(target.url) for _ in range(NUM_SLOW_HEADERS)]
    while not stop.wait(0.05):
        for place, connection in enumerate(connections):
            if _is_closed(connection):
                connection.close()
                connections[place] = _half_header(target.url)


def slow_media(target: Target, stop: Event) -> None:
    _ask_at_once(target.url, lambda: {"type": "image_url", "image_url": {"url": target.media_url}}, stop, number=32)


def bombs(target: Target, stop: Event) -> None:
    header = b"IHDR" + (50_000).to_bytes(4) * 2 + b"\x08\x02\0\0\0"
    png = b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + zlib.crc32(header).to_bytes(4)
    pixels = b"IDAT" + zlib.compress(bytes(50_000_000))
    png += (len(pixels) - 4).to_bytes(4) + pixels + zlib.crc32(pixels).to_bytes(4)
    _ask_at_once(target.url, lambda: picture_part(png), stop, number=8)


def large_pictures(target: Target, stop: Event) -> None:
    _ask_about_copies(target.url, encoded(Image.effect_noise((3840, 2160), 50).convert("RGB"), "JPEG"), stop)


def small_files_of_many_pixels(target: Target, stop: Event) -> None:
    _ask_about_copies(target.url, encoded(Image.new("RGB", (7000, 7000)), "WEBP"), stop)


def grammars(target: Target, stop: Event) -> None:
    """Every grammar differs, so that no refusal is cached."""
    chance = random.Random(0)

    def letters() -> bytes:
        return _asking_for({"regex": "".join(chance.choices(string.ascii_letters, k=100_000))})

    def multiple() -> bytes:
        return _asking_for({"json": {"type": "integer", "multipleOf": chance.randrange(10**6, 10**7)}})

    def costly() -> bytes:
        """An accepted grammar whose masks take some milliseconds each."""
        return _asking_for({"regex": "".join(chance.choices(string.ascii_letters, k=8_000))})

    _post_at_once(target.url, [letters, letters, letters, multiple, costly], stop)


def orders_to_ray_serve(target: Target, stop: Event) -> None:
    """Clients that leave at once, with headers that Ray Serve reads before the key is checked."""
    values = (b"\xff", b"0.001", b"?1", b"a b!")

    def run(value: bytes) -> None:
        headers = {b"Content-Type": b"application/json"} | dict.fromkeys(_OF_RAY_SERVE, value)
        body = _body([{"type": "text", "text": "Hello"}], max_tokens=1000, ignore_eos=True)
        while not stop.is_set():
            with suppress(httpx.TransportError):
                httpx.post(target.url + CHAT, content=body, headers=headers, timeout=0.2)

    for value in values:
        threading.Thread(target=run, args=(value,), daemon=True).start()
    stop.wait()


def connections_without_a_token(target: Target, stop: Event) -> None:
    _hold_connections(target.private_ports, stop)


def connections_to_ray(target: Target, stop: Event) -> None:
    _hold_connections(target.ray_ports, stop)


def _hold_connections(ports: Sequence[int], stop: Event) -> None:
    """As another user of the machine, with as many connections as allowed."""
    become_nobody()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100
    connections: deque[socket.socket] = deque()
    for port in itertools.cycle(ports):
        if stop.is_set():
            return
        with suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
        if len(connections) > most:
            connections.popleft().close()


def malformed_messages(target: Target, stop: Event) -> None:
    """From a process that knows the token, to a shard."""
    assert target.shard is not None
    asyncio.run(_send_malformed(target.shard, stop))


async def _send_malformed(shard: "PortAddress", stop: Event) -> None:
    from raylens.deployments.item_store.codec import pack
    from raylens.deployments.item_store.messages import Remember
    from raylens.deployments.wire.private_port import connect, frame

    chance = random.Random(0)
    good = pack(Remember("tenant", "name", "hash"))[4:]
    while not stop.is_set():
        with suppress(OSError):
            reader, writer = await connect(shard)
            place = chance.randrange(len(good))
            bad = good[:place] + chance.randbytes(chance.randint(0, 9)) + good[place + chance.randint(0, 9) :]
            writer.write(frame(bad) + b"\xff\xff\xff\xff")
            await reader.read()
            writer.close()


CONTROL = "the same JSON, to a server that only reads"
"""Runs beside the server at `url` instead of against it: shows the delays caused by the machine alone."""

ATTACKS: dict[str, Attack | None] = {
    "nothing": None,
    "bodies of 100 MB": large_bodies,
    "JSON of 20 to 101 MB": json_bodies,
    CONTROL: json_bodies,
    "bodies that trickle in": trickling_bodies,
    f"{NUM_SLOW_HEADERS} half headers": slow_headers,
    "media that never end": slow_media,
    "bombs": bombs,
    "4K pictures": large_pictures,
    "pictures of 7000 x 7000": small_files_of_many_pixels,
    "grammars": grammars,
    "headers of Ray Serve": orders_to_ray_serve,
    "connections without a token": connections_without_a_token,
    "connections to Ray's ports": connections_to_ray,
    "malformed messages": malformed_messages,
}


def _connect(url: str) -> socket.socket:
    to = urlsplit(url)
    return socket.create_connection((to.hostname or "", to.port or 80))


def _half_header(url: str) -> socket.socket:
    connection = _connect(url)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost:".encode())
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _noise_parts(megabytes: int) -> list[dict[str, Any]]:
    """Invalid pictures, each of at most 20 MB of base64."""
    number = -(-megabytes // 20)
    return [picture_part(os.urandom(megabytes * 750_000 // number)) for _ in range(number)]


def _body(parts: list[dict[str, Any]], **fields: Any) -> bytes:
    body = {"model": "shapes", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


def _asking_for(form: dict[str, Any]) -> bytes:
    return _body([{"type": "text", "text": "Hello"}], structured_outputs=form, max_tokens=500)


def _ask_at_once(url: str, part: Callable[[], dict[str, Any]], stop: Event, number: int) -> None:
    _post_at_once(url, [lambda: _body([part()])] * number, stop)


def _ask_about_copies(url: str, content: bytes, stop: Event) -> None:
    # Bytes after a picture's end are not part of it, but change its hash in every cache.
    _ask_at_once(url, lambda: picture_part(content + os.urandom(8)), stop, number=8)


def _post_at_once(url: str, bodies: Sequence[Callable[[], bytes]], stop: Event) -> None:
    """One client per entry of `bodies`, each with one request after the other."""

    def run(body: Callable[[], bytes]) -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                with suppress(httpx.TransportError):
                    client.post(url + CHAT, content=body(), headers={"Content-Type": "application/json"})

    for body in bodies:
        threading.Thread(target=run, args=(body,), daemon=True).start()
    stop.wait()
