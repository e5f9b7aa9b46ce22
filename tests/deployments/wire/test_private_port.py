"""A port of a process is open to those that know its token, however many others come."""

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.wire import private_port
from raylens.deployments.wire.private_port import (
    MAX_FRAME_BYTES,
    MalformedMessageError,
    PortAddress,
    PrivatePort,
    Reader,
    Writer,
    connect,
    frame,
    read_frame,
)
from tests.waiting import until


async def echo(reader: Reader, writer: Writer) -> None:
    while True:
        body = await read_frame(reader)
        if body == b"fail":
            raise RuntimeError("a fault of ours")
        writer.write(frame(body))


@pytest.fixture
async def port() -> AsyncIterator[PrivatePort]:
    opened = PrivatePort(echo)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_port, "_PROOF_SECONDS", 0.2)
    monkeypatch.setattr(private_port, "_PAUSE_SECONDS", 0.001)


async def echoed(address: PortAddress, body: bytes) -> bytes:
    reader, writer = await connect(address)
    writer.write(frame(body))
    answer = await read_frame(reader)
    writer.close()
    return answer


async def test_frames_arrive_whole(port: PrivatePort) -> None:
    for body in (b"", b"a", b"b" * 2**20):
        assert await echoed(port.address, body) == body


# Who is let in


@pytest.mark.parametrize("sent", [b"", b"t" * 47, b"t" * 48 + b"\0\0\0\x01\x90"], ids=["nothing", "a part", "another"])
async def test_who_does_not_know_the_token_is_refused(
    port: PrivatePort, sent: bytes, no_patience: None, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(port.address.host, port.address.port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        assert len(await asyncio.wait_for(reader.read(), 5)) == 16, "the challenge, and no more"
    writer.close()
    assert ("does not know the token" in caplog.text) == (len(sent) >= 48)
    assert not port._connections
    assert not port._newcomers


async def test_who_has_another_token_finds_nobody(port: PrivatePort, no_patience: None) -> None:
    other = replace(port.address, token=secrets.token_bytes(32))
    with pytest.raises(ConnectionAbortedError) as caught:
        await connect(other)
    assert repr(other.token) not in str(caught.value)


async def test_what_was_heard_of_a_proof_opens_nothing(port: PrivatePort, no_patience: None) -> None:
    heard: list[bytes] = []

    async def pass_on(reader: Reader, writer: Writer) -> None:
        beyond, there = await asyncio.open_connection(port.address.host, port.address.port)
        writer.write(await beyond.readexactly(16))
        heard.append(await reader.readexactly(48))
        there.write(heard[0])
        writer.write(await beyond.readexactly(32))
        await writer.drain()
        there.close()
        writer.close()

    relay = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    host, number = relay.sockets[0].getsockname()
    _, writer = await connect(PortAddress(host, number, port.address.token))
    assert port.address.token not in heard[0]
    writer.close()
    relay.close()
    reader, writer = await asyncio.open_connection(port.address.host, port.address.port)
    writer.write(heard[0])
    assert len(await reader.read()) == 16
    writer.close()


async def test_who_listens_in_another_process_place_learns_nothing_and_is_not_believed(no_patience: None) -> None:
    token, learned = secrets.token_bytes(32), b""

    async def pretend(reader: Reader, writer: Writer) -> None:
        nonlocal learned
        writer.write(secrets.token_bytes(16))
        learned += await reader.readexactly(48)
        writer.write(learned[16:])  # a proof, but of the other end
        await writer.drain()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError, match="does not know its token"):
        await connect(PortAddress("127.0.0.1", server.sockets[0].getsockname()[1], token))
    assert token not in learned
    server.close()


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(PortAddress("host", 1, b"secret"))


# Who comes in thousands


@contextmanager
def flood(address: PortAddress, most: int) -> Iterator[list[int]]:
    """Opens connections as fast as one thread can, and keeps the newest `most` of them. Yields a list that grows by one
    with each."""
    opened: list[int] = []
    stop = threading.Event()

    def run() -> None:
        kept: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection((address.host, address.port), timeout=1))
                opened.append(1)
            if len(kept) > most:
                kept.pop(0).close()
        for one in kept:
            one.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield opened
    finally:
        stop.set()
        thread.join()


@pytest.mark.long
async def test_connections_without_a_proof_are_bounded_and_others_come_through(
    port: PrivatePort, caplog: pytest.LogCaptureFixture
) -> None:
    most, slowest = 0, 0.0
    with flood(port.address, 500) as opened:
        await until(lambda: len(opened) > 500)
        for number in range(5):
            started = time.monotonic()
            assert await echoed(port.address, b"%d" % number) == b"%d" % number
            slowest = max(slowest, time.monotonic() - started)
            most = max(most, len(port._newcomers))
    assert most <= 100 < len(opened)
    assert slowest < 5
    assert len([one for one in caplog.records if "refused" in one.message]) == 1, "a flood of connections, not of lines"


@pytest.mark.long
async def test_a_connection_is_not_pushed_out_once_it_has_proved_itself(port: PrivatePort) -> None:
    reader, writer = await connect(port.address)
    with flood(port.address, 500) as opened:
        await until(lambda: len(opened) > 500)
        writer.write(frame(b"still here"))
        assert await read_frame(reader) == b"still here"
    writer.close()


async def test_connections_that_say_nothing_end_in_time(port: PrivatePort, no_patience: None) -> None:
    connections = [await asyncio.open_connection(port.address.host, port.address.port) for _ in range(50)]
    for reader, writer in connections:
        assert len(await asyncio.wait_for(reader.read(), 5)) == 16
        writer.close()
    await until(lambda: not port._newcomers)


# What goes wrong on a connection


async def test_an_error_ends_its_connection_only_and_is_logged(
    port: PrivatePort, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await connect(port.address)
    writer.write(frame(b"fail"))
    assert await reader.read() == b""
    writer.close()
    assert "a fault of ours" in caplog.text
    assert await echoed(port.address, b"next") == b"next"


async def test_a_frame_of_four_gigabytes_is_refused_at_its_first_bytes(
    port: PrivatePort, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await connect(port.address)
    writer.write(b"\xff\xff\xff\xff")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert f"a message of {2**32 - 1} bytes, the limit is {MAX_FRAME_BYTES}" in caplog.text


def test_no_frame_is_sent_that_nobody_would_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_port, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="a message of 11 bytes, the limit is 10"):
        frame(b"x" * 11)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64))
def test_bytes_of_any_kind_make_frames_or_one_kind_of_error(sent: bytes) -> None:
    async def read_all() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        while True:
            await read_frame(reader)

    with pytest.raises((MalformedMessageError, asyncio.IncompleteReadError)):
        asyncio.run(read_all())


async def test_closing_ends_its_connections(port: PrivatePort) -> None:
    address = port.address
    reader, writer = await connect(address)
    newcomer, silent = await asyncio.open_connection(address.host, address.port)
    writer.write(frame(b"a"))
    await read_frame(reader)
    await newcomer.readexactly(16)
    await port.close()
    for end in (reader, newcomer):
        assert await asyncio.wait_for(end.read(), 5) == b""
    for one in (writer, silent):
        one.close()
    with pytest.raises(ConnectionRefusedError):
        await connect(address)
