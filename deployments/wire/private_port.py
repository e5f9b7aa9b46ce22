"""A TCP port for processes of the same cluster. It refuses connections without its token.

The address travels in a Ray call, so only the application's processes know the token. Each end proves it by an HMAC of
the other's random number. The token itself never travels, so an impostor on a dead process's port learns nothing. The
port then carries data and no code, unencrypted, in frames: the length in four bytes, big-endian, then the body."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ray.util import get_node_ip_address

logger = logging.getLogger(f"ray.serve.{__name__}")

MAX_FRAME_BYTES = 2**28
_TOKEN_BYTES = _PROOF_BYTES = 32
NONCE_BYTES = 16
_PROOF_SECONDS = 5.0
_LENGTH_BYTES = 4
_MAX_NEWCOMERS = 100
"""Limit of connections that have not proved the token yet. One more evicts the oldest, because the application's
processes prove it within a few turns of the event loop."""
_QUEUE_LENGTH = 128
_NUM_TRIES, _PAUSE_SECONDS = 20, 0.05
"""Retries of `connect` after evictions by other newcomers."""
_QUIET_SECONDS = 60.0
"""Least time between two log lines about refused connections."""

_TCP_OPTIONS = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6_000}
"""Keepalive: seconds until an idle connection is probed, seconds between probes, and failed probes until it is closed.
TCP_USER_TIMEOUT: milliseconds that sent data may stay unacknowledged. On Linux, it also closes idle connections,
whatever the number of probes, and connections whose other end stops reading, once some megabytes of buffers are full.
"""

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


class MalformedMessageError(Exception):
    """A message that no process of this application sends."""


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Address of a port. `token` grants access."""

    host: str
    port: int
    token: bytes = field(repr=False)


class PrivatePort:
    """Listens, and calls `serve(reader, writer)` for each connection with the token; the connection closes with the
    call. Reading and writing raise OSError or IncompleteReadError when the connection is lost, CancelledError on
    `close`. Other errors of `serve` are logged. Use it on one event loop."""

    def __init__(self, serve: Callable[[Reader, Writer], Awaitable[None]]) -> None:
        self._serve = serve
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._newcomers: dict[asyncio.Task[None], None] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._num_untold_refusals = 0
        self._refusals_told_at = -_QUIET_SECONDS

    async def open(self) -> None:
        """Listens on this node's cluster address."""
        host = get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_QUEUE_LENGTH)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_forever(self._listener))

    async def close(self) -> None:
        """Closes all connections and the port."""
        if self._listener is None or self._accepting is None:
            return
        tasks = [self._accepting, *self._newcomers, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()

    @property
    def address(self) -> PortAddress:
        assert self._listener is not None, "opened before anybody is told the address"
        host, port, *_ = self._listener.getsockname()
        return PortAddress(host, port, self._token)

    async def _accept_forever(self, listener: socket.socket) -> None:
        """Accepts one connection per turn of the event loop. asyncio's own servers accept a hundred at once. A flood
        would block this process and evict newcomers in the middle of their proof."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)  # too many open files
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._newcomers) == _MAX_NEWCOMERS:
                oldest = next(iter(self._newcomers))
                del self._newcomers[oldest]
                oldest.cancel()
                self._note_refusal("too many newer ones arrived before its proof of the token")
            self._newcomers[loop.create_task(self._receive(connection))] = None
            await asyncio.sleep(0)

    async def _receive(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None, "each connection has a task"
        writer = peer = None
        try:
            peer = connection.getpeername()
            reader, writer = await asyncio.open_connection(sock=connection)
            _notice_lost_nodes(writer)
            async with asyncio.timeout(_PROOF_SECONDS):
                is_known = await _is_known(reader, writer, self._token)
            if is_known:
                self._newcomers.pop(task, None)
                self._connections.add(task)
                await self._serve(reader, writer)
            else:
                self._note_refusal(f"{peer} does not know the token")
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other end is gone, or gave no proof in time
        except MalformedMessageError as error:
            logger.error("closed the connection from %s: %s", peer, error)
        except Exception:
            logger.exception("closed the connection from %s, after an error", peer)
        finally:
            self._newcomers.pop(task, None)
            self._connections.discard(task)
            (writer or connection).close()

    def _note_refusal(self, reason: str) -> None:
        """Logs refused connections, rate-limited."""
        self._num_untold_refusals += 1
        now = asyncio.get_running_loop().time()
        if now - self._refusals_told_at >= _QUIET_SECONDS:
            logger.warning("refused %d connections, the last one because %s", self._num_untold_refusals, reason)
            self._num_untold_refusals, self._refusals_told_at = 0, now


def _notice_lost_nodes(writer: Writer) -> None:
    """Makes the connection fail within seconds after the other end's node is lost."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect(address: PortAddress) -> tuple[Reader, Writer]:
    """Raises OSError if the port is closed or its listener does not know the token."""
    for attempt in range(_NUM_TRIES):
        if attempt:
            await asyncio.sleep(_PAUSE_SECONDS)
        try:
            return await _connect_once(address)
        except (ConnectionResetError, asyncio.IncompleteReadError):
            pass  # evicted or refused
    raise ConnectionAbortedError(f"{address} has closed {_NUM_TRIES} connections")


async def _connect_once(address: PortAddress) -> tuple[Reader, Writer]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        _notice_lost_nodes(writer)
        async with asyncio.timeout(_PROOF_SECONDS):
            if await _knows(reader, writer, address.token):
                return reader, writer
        raise ConnectionRefusedError(f"{address} belongs to a process that does not know its token")
    except BaseException:
        writer.close()
        raise


async def _is_known(reader: Reader, writer: Writer, token: bytes) -> bool:
    """Returns whether the connecting end knows the token; if so, proves the same of this end."""
    challenge = secrets.token_bytes(NONCE_BYTES)
    writer.write(challenge)
    nonces = challenge + await reader.readexactly(NONCE_BYTES)
    if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), _proof(token, b"connects", nonces)):
        return False
    writer.write(_proof(token, b"listens", nonces))
    return True


async def _knows(reader: Reader, writer: Writer, token: bytes) -> bool:
    """Proves that this end knows the token. Returns whether the listening end does."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = await reader.readexactly(NONCE_BYTES) + nonce
    writer.write(nonce + _proof(token, b"connects", nonces))
    return hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), _proof(token, b"listens", nonces))


def _proof(token: bytes, end: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, end + nonces, "sha256")


def frame(body: bytes) -> bytes:
    """Returns the body behind its length. Raises ValueError if the body exceeds MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES) + body


async def read_frame(reader: Reader) -> bytes:
    """Returns the body of the next frame. Raises IncompleteReadError when the connection ends, MalformedMessageError
    for a frame that is too long."""
    num_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if num_bytes > MAX_FRAME_BYTES:
        raise MalformedMessageError(f"a message of {num_bytes} bytes, the limit is {MAX_FRAME_BYTES}")
    return await reader.readexactly(num_bytes)
