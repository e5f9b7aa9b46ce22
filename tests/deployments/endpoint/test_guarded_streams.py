"""Streams of a server that dies, read by a client of plain sockets; the server is uvicorn, as in Ray Serve."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylens.deployments.launch.local_cluster import free_port
from tests.replicas import children
from tests.waiting import wait_until

SERVER = textwrap.dedent(
    """
    import asyncio, sys, uvicorn
    from raylens.deployments.endpoint.guarded_streams import GuardedStreams
    from starlette.responses import StreamingResponse

    async def events(path):
        number = 0
        while path != "/short" or number < 3:
            yield b"x" * 65536 if path == "/large" else b"data: 1\\n\\n"
            await asyncio.sleep(0 if path == "/large" else 0.02)
            number += 1

    async def app(scope, receive, send):
        kind = "text/plain" if scope["path"] == "/plain" else "text/event-stream"
        await StreamingResponse(events(scope["path"]), media_type=kind)(scope, receive, send)

    uvicorn.run(GuardedStreams(app), port=int(sys.argv[1]), lifespan="off", log_level="critical")
    """
)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Its pid and its port."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)]) as process:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield process.pid, port
        process.kill()


def opened(port: int, path: str, version: str = "1.1", *, buffer_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.connect(("127.0.0.1", port))
    client.settimeout(10)
    client.sendall(f"GET {path} HTTP/{version}\r\nHost: x\r\n\r\n".encode())
    return client


def rest_of(client: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            chunk = client.recv(65536)
        except ConnectionResetError:
            return received
        if not chunk:
            return received
        received += chunk


LAST = b'data: {"error":{"message":"the endpoint\'s process has ended, try again","type":"server_error","param":null'


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_gets_an_event_and_its_end(server: tuple[int, int], version: str) -> None:
    pid, port = server
    client = opened(port, "/v1/completions", version)
    assert client.recv(10)
    time.sleep(0.2)
    (guardian,) = children(pid)
    os.kill(pid, signal.SIGKILL)
    rest = rest_of(client)
    assert LAST in rest
    assert rest.endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == "1.1" else b""))
    wait_until(lambda: not Path(f"/proc/{guardian}").exists())


def test_what_is_no_stream_breaks_off(server: tuple[int, int]) -> None:
    pid, port = server
    stream, plain = opened(port, "/"), opened(port, "/plain")
    assert stream.recv(10)
    assert plain.recv(10)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert LAST in rest_of(stream)
    assert b"error" not in rest_of(plain)


def test_a_client_that_is_behind_gets_nothing_that_could_be_taken_for_data(server: tuple[int, int]) -> None:
    pid, port = server
    client = opened(port, "/large", buffer_bytes=4096)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    assert b"error" not in rest_of(client)


def test_a_stream_that_has_ended_and_one_whose_client_has_left_are_held_no_longer(server: tuple[int, int]) -> None:
    pid, port = server
    short, left = opened(port, "/short"), opened(port, "/")
    assert left.recv(10)
    time.sleep(0.2)
    (guardian,) = children(pid)
    left.close()

    def num_sockets() -> int:
        links = [os.readlink(link) for link in Path(f"/proc/{guardian}/fd").iterdir()]
        return sum(link.startswith("socket:") for link in links)

    wait_until(lambda: num_sockets() == 1)  # its way to the server
    received = short.recv(65536)
    while not received.endswith(b"0\r\n\r\n"):
        received += short.recv(65536)
    os.kill(pid, signal.SIGKILL)
    assert rest_of(short) == b""


def test_without_the_guardian_streams_go_on(server: tuple[int, int]) -> None:
    pid, port = server
    first = opened(port, "/")
    assert first.recv(10)
    time.sleep(0.2)
    (guardian,) = children(pid)
    os.kill(guardian, signal.SIGKILL)
    second = opened(port, "/short")
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += second.recv(65536)
    assert b"error" not in received
    assert first.recv(10)
    third = opened(port, "/")  # has another guardian started
    assert third.recv(10)
    time.sleep(0.3)
    assert len(children(pid)) == 1
    os.kill(pid, signal.SIGKILL)
    assert LAST in rest_of(third)
