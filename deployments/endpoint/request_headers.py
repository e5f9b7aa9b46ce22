"""ASGI middleware in front of Ray Serve's own code: clients give no orders to Ray Serve.

Ray Serve reads headers before the gate does. They let anybody shorten a request's time, route it, or have the server
go on with it after its client has left, and one with a byte beyond ASCII ends the request with a bare 500 that no log
has. So Ray Serve sees none of them but the request's id, in the form that the log has.

Ray Serve installs the middleware: see `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` in
`deployments/cluster/ray_environment.py`."""

import re
import uuid

from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

REQUEST_ID = SERVE_HTTP_REQUEST_ID_HEADER.encode()
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_RAY_SERVE = (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
_TRACE_CONTEXT = frozenset({b"traceparent", b"tracestate"})
"""Ray Serve reads these where an operator has it send traces."""


def middlewares() -> list[Middleware]:
    """Returns the middleware that Ray Serve puts in front of its own code."""
    return [Middleware(RequestHeaders)]


class RequestHeaders:
    """Takes Ray Serve's own headers out of each request, and puts an id in that can stand in a log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "headers": _cleaned(scope["headers"])}, receive, send)


def checked_request_id(given: str) -> str:
    """Returns the client's own id if it can stand in a log, else a new one."""
    return given if _REQUEST_ID_FORM.fullmatch(given) else uuid.uuid4().hex


def _cleaned(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = next((value for name, value in headers if name == REQUEST_ID), b"")
    kept = [(name, value) for name, value in headers if not _is_dropped(name, value)]
    return [*kept, (REQUEST_ID, checked_request_id(given.decode("latin-1")).encode())]


def _is_dropped(name: bytes, value: bytes) -> bool:
    if name in _TRACE_CONTEXT:
        return not value.isascii()
    return _normalised(name) in _DROPPED


def _normalised(name: bytes) -> bytes:
    """Returns the form by which Ray Serve compares names: proxies change `_` into `-`."""
    return name.lower().replace(b"_", b"-")


_DROPPED = frozenset(_normalised(name.encode()) for name in (*_OF_RAY_SERVE, SERVE_HTTP_REQUEST_ID_HEADER))
