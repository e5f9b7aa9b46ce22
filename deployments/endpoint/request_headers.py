"""ASGI middleware in front of Ray Serve's own code: clients give no orders to Ray Serve.

Ray Serve reads headers before the gate does (`deployments/ray_internals/http_headers.py`). It sees none of them but the
request's id, in the form that the log has. Ray Serve installs the middleware: see
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` in `deployments/ray_internals/environment.py`."""

import re
import uuid

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylens.deployments.ray_internals import http_headers

REQUEST_ID = http_headers.REQUEST_ID.encode()
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9_-]{1,64}")
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


_DROPPED = frozenset(_normalised(name.encode()) for name in (*http_headers.ORDERS, http_headers.REQUEST_ID))
