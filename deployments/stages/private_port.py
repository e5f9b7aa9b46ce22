"""A TCP port for processes of the same cluster: who does not send its token at once is refused.

Its address travels by a call of Ray, so only processes of the application know the token. What goes through the port is
data and no code, in frames: four bytes with the length, big-endian, and as many bytes."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.util import get_node_ip_address

logger = logging.getLogger(f"ray.serve.{__name__}")

_TOKEN_BYTES = 32
_TOKEN_SECONDS = 5.0
_LENGTH_BYTES = 4

_TCP_OPTIONS = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 20_000}
"""The seconds until an idle connection is tried, those between two trials, and the trials that may fail. Last the
milliseconds that what was sent may stay unanswered: longer, for a process that falls behind has its node answer so."""

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Where a port is. The `token` opens it."""

    host: str
    port: int
    token: bytes = field(repr=False)


class PrivatePort:
    """Listens, and calls `serve(reader, writer)` for each connection that has sent the token. The connection ends with
    the call, and the call when the connection is lost, by OSError or IncompleteReadError. Use it on one event loop."""

    def __init__(self, serve: Callable[[Reader, Writer], Awaitable[None]]) -> None:
        self._serve = serve
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], Writer] = {}

    async def open(self) -> None:
        """Listens on the address by which other nodes of the cluster know this one."""
        self._server = await asyncio.start_server(self._receive, get_node_ip_address(), 0)

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.close()
        if self._connections:
            await asyncio.wait(self._connections)

    @property
    def address(self) -> PortAddress:
        assert self._server is not None, "opened before anybody is told the address"
        host, port, *_ = self._server.sockets[0].getsockname()
        return PortAddress(host, port, self._token)

    async def _receive(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server makes a task of each connection"
        self._connections[task] = writer
        _notice_lost_nodes(writer)
        try:
            async with asyncio.timeout(_TOKEN_SECONDS):
                token = await reader.readexactly(_TOKEN_BYTES)
            if not hmac.compare_digest(token, self._token):
                logger.warning("refused a connection from %s: wrong token", writer.get_extra_info("peername"))
                return
            await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # the other end has gone
        finally:
            del self._connections[task]
            writer.close()


def _notice_lost_nodes(writer: Writer) -> None:
    """Has the connection fail within seconds when the other end's node is gone, which sends no word of it."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect(address: PortAddress) -> tuple[Reader, Writer]:
    """Raises OSError where nobody listens."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    _notice_lost_nodes(writer)
    writer.write(address.token)
    return reader, writer


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES) + body


async def read_frame(reader: Reader) -> bytes:
    """Returns the body of the next frame. Raises IncompleteReadError where the connection ends."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH_BYTES)))
