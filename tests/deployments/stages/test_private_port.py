"""A port of a process is open to those that know its token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from deployments.stages import private_port
from deployments.stages.private_port import PrivatePort, Reader, Writer, connect, frame, read_frame


async def echo(reader: Reader, writer: Writer) -> None:
    while True:
        writer.write(frame(await read_frame(reader)))


@pytest.fixture
async def port() -> AsyncIterator[PrivatePort]:
    opened = PrivatePort(echo)
    await opened.open()
    yield opened
    await opened.close()


async def test_frames_arrive_whole(port: PrivatePort) -> None:
    reader, writer = await connect(port.address)
    for body in (b"", b"a", b"b" * 2**20):
        writer.write(frame(body))
        assert await read_frame(reader) == body
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"t" * 31, b"t" * 32 + b"\0\0\0\x01\x90"], ids=["nothing", "a part", "another"])
async def test_who_does_not_know_the_token_is_refused(
    port: PrivatePort, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_port, "_TOKEN_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection(port.address.host, port.address.port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert ("wrong token" in caplog.text) == (len(sent) >= 32)
    assert not port._connections


async def test_closing_ends_its_connections(port: PrivatePort) -> None:
    address = port.address
    reader, writer = await connect(address)
    writer.write(frame(b"a"))
    await read_frame(reader)
    await port.close()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await connect(address)


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(private_port.PortAddress("host", 1, b"secret"))
