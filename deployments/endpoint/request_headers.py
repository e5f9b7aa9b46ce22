"""ASGI middleware in front of Ray Serve: clients cannot control Ray Serve by headers.

Ray Serve reads headers before the gate does (`deployments/ray_internals/http_headers.py`). Of its own headers it sees
only the request's id, in a form that is safe to log. Ray Serve installs the middleware: see
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` in `deployments/ray_internals/environment.py`."""

import re
import uuid

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylens.deployments.ray_internals import http_headers

_REQUEST_ID = http_headers.REQUEST_ID.encode()
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TRACE_CONTEXT = frozenset({b"traceparent", b"tracestate"})
"""Ray Serve reads these if an operator has enabled its traces."""


def middlewares() -> list[Middleware]:
    return [Middleware(RequestHeaders)]


class RequestHeaders:
    """Removes Ray Serve's own headers from each request, and adds a request id that is safe to log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == _REQUEST_ID), b"")
        kept = [(name, value) for name, value in headers if not _is_dropped(name, value)]
        own = (_REQUEST_ID, checked_request_id(given.decode("latin-1")).encode())
        await self._app({**scope, "headers": [*kept, own]}, receive, send)


def checked_request_id(given: str) -> str:
    """Returns the client's own id if it is safe to log, else a new one."""
    return given if _REQUEST_ID_FORM.fullmatch(given) else uuid.uuid4().hex


def _is_dropped(name: bytes, value: bytes) -> bool:
    return not value.isascii() if name in _TRACE_CONTEXT else _normalised(name) in _DROPPED


def _normalised(name: bytes) -> bytes:
    """Returns the form in which Ray Serve compares names. Proxies change `_` into `-`."""
    return name.lower().replace(b"_", b"-")


_DROPPED = frozenset(_normalised(name.encode()) for name in (*http_headers.ORDERS, http_headers.REQUEST_ID))
