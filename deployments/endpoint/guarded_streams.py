"""ASGI middleware in front of the ingress: a stream ends with an error event even when its ingress is killed.

The connection of a killed process is closed at once, and its client would see a stream that breaks off. So each open
stream's socket is also held by a small process (`deployments/endpoint/stream_guardian.py`), which writes the event when
the ingress has gone. Ray Serve puts the middleware outermost, where its server's own `send` shows the connection: see
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` in `deployments/cluster/ray_environment.py`."""

import itertools
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylens.deployments.api.wire import ErrorBody, ErrorResponse
from raylens.deployments.endpoint import stream_guardian
from raylens.deployments.endpoint.answer import Chunks, sent_event
from raylens.deployments.endpoint.request_headers import RequestHeaders
from raylens.deployments.endpoint.stream_guardian import GUARD, NUMBER_BYTES, RELEASE

logger = logging.getLogger(f"ray.serve.{__name__}")

_RESPONSES_PATH = "/v1/responses"


class _ErrorEvent(BaseModel):
    """The error event of the Responses API."""

    type: str = "error"
    code: str
    message: str
    param: str | None = None
    sequence_number: int = 2**31 - 1  # behind whatever has been sent


def middlewares() -> list[Middleware]:
    """Returns what Ray Serve puts in front of an application, and of its own code, the outermost last."""
    return [Middleware(RequestHeaders), Middleware(GuardedStreams)]


class GuardedStreams:
    """Has the guardian hold each stream of server-sent events while it is open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._guardian = Guardian()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _connection_of(send) if scope["type"] == "http" else None
        if connection is None:
            await self._app(scope, receive, send)
            return
        with self._guardian.stream(connection, _last_bytes(scope)) as stream:

            async def guarded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    if _is_event_stream(message):
                        stream.hold()
                    return
                if not message.get("more_body", False):
                    stream.release()
                await send(message)

            await self._app(scope, receive, guarded)


class Guardian:
    """The process that holds streams. It starts with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count()

    @contextmanager
    def stream(self, connection: socket.socket, last: bytes) -> "Iterator[GuardedStream]":
        """Yields a stream that is held from `hold` until `release`, or else until the block ends. `last`: the bytes
        that end it if this process dies."""
        number = next(self._numbers).to_bytes(NUMBER_BYTES)
        stream = GuardedStream(self, number, connection, last)
        try:
            yield stream
        finally:
            stream.release()

    def tell(self, message: bytes, connection: socket.socket | None = None) -> bool:
        """Sends the guardian a message, with a copy of the connection. Returns whether it went."""
        try:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            fds = [] if connection is None else [connection.fileno()]
            socket.send_fds(self._socket, [message], fds)
        except OSError as error:
            logger.warning("streams are not guarded any more: %s", error)
            self._stop()
            return False
        return True

    def _start(self) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        with other:
            # A session of its own: what ends the ingress by its group is not to end the guardian before it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", stream_guardian.__file__], stdin=other.fileno(), start_new_session=True
            )
        self._socket = own

    def _stop(self) -> None:
        """Ends the guardian first: to close its socket would have it end streams that go on."""
        process, own = self._process, self._socket
        self._process = self._socket = None
        if process is not None:
            process.kill()
            process.wait()
        if own is not None:
            own.close()


class GuardedStream:
    """One stream, held or not."""

    def __init__(self, guardian: Guardian, number: bytes, connection: socket.socket, last: bytes) -> None:
        self._guardian = guardian
        self._number = number
        self._connection = connection
        self._last = last
        self._is_held = False

    def hold(self) -> None:
        self._is_held = self._guardian.tell(GUARD + self._number + self._last, self._connection)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._guardian.tell(RELEASE + self._number)


def _connection_of(send: Any) -> socket.socket | None:
    """Returns the client's socket, if `send` is that of Ray Serve's HTTP server, uvicorn."""
    with suppress(AttributeError):
        found: socket.socket | None = send.__self__.transport.get_extra_info("socket")
        return found
    return None


def _is_event_stream(message: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"])


def _last_bytes(scope: Scope) -> bytes:
    """Returns what ends a stream: an event that says why, and the end of the body."""
    events = _last_events(is_of_responses=scope["path"] == _RESPONSES_PATH).encode()
    return events if scope["http_version"] == "1.0" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


def _last_events(*, is_of_responses: bool) -> str:
    message, code = "the endpoint's process has ended, try again", "endpoint_unavailable"
    if is_of_responses:
        return sent_event(_ErrorEvent(code=code, message=message), "error")
    chunks = Chunks()
    error = ErrorBody(message=message, type="server_error", param=None, code=code)
    return chunks.error_event(ErrorResponse(error=error)) + chunks.last_event
