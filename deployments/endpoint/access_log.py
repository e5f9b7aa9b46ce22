"""Logs one line for each finished request, and counts each failed one in the metrics."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from raylens.deployments.endpoint.errors import error_kind
from raylens.deployments.server_log import FIELDS

logger = logging.getLogger(f"ray.serve.{__name__}")

_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/dashboard/data"})
"""Programs poll these every few seconds. The log shows only their failures, and none while the stages start."""
_MAX_NAMES = 20


class AccessLog:
    """The request log of one endpoint. It calls `count_error(stage, code)` for each failed request outside the polled
    paths."""

    def __init__(self, count_error: Callable[[str, str], None]) -> None:
        self._count_error = count_error

    @contextmanager
    def entry(self, scope: Scope) -> Iterator["Entry"]:
        """Logs one request when the block ends. `scope["state"]["error"]` holds the cause of a failure."""
        entry = Entry(scope)
        try:
            yield entry
        finally:
            error = scope["state"].get("error")
            if error is not None and not entry.is_quiet:
                self._count_error(*error_kind(error))
            entry.write(error)


def listed(names: Sequence[str]) -> str:
    """Joins the names, and abbreviates a long list, for a log line or a header."""
    told = ", ".join(names[:_MAX_NAMES])
    return told if len(names) <= _MAX_NAMES else f"{told}, and {len(names) - _MAX_NAMES} more"


def is_quiet(scope: Scope) -> bool:
    """Returns whether programs poll this path."""
    return scope["path"] in _QUIET_PATHS


class Entry:
    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._started = time.perf_counter()
        self._first_byte: float | None = None
        self._status: int | None = None
        self._num_bytes = 0

    @property
    def is_quiet(self) -> bool:
        return is_quiet(self._scope)

    @property
    def has_begun_well(self) -> bool:
        """Whether a successful answer has begun. A later error breaks it off."""
        return self._first_byte is not None and self._status is not None and self._status < 400

    def status(self, error: Exception | None) -> int:
        """Returns the answer's status: 500 if `error` ended the request before an answer, 499 if the client left before
        one."""
        return self._status or (500 if error is not None else 499)

    def noting(self, send: Send) -> Send:
        """Wraps `send` to record the status, the time of the first byte and the number of bytes."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
            elif message["type"] == "http.response.body":
                if self._first_byte is None:
                    self._first_byte = time.perf_counter()
                self._num_bytes += len(message.get("body", b""))
            await send(message)

        return noted

    def write(self, error: Exception | None) -> None:
        now = time.perf_counter()
        state = self._scope["state"]
        is_failure = self._status is None or self._status >= 500
        if self.is_quiet and (not is_failure or state.get("is_starting")):
            return
        status = self.status(error)
        first = (self._first_byte or now) - self._started
        line = (
            f"{self._scope['method']} {self._scope['path'][:100]} {status} {state['request_id']}:"
            f" {state.get('num_body_bytes', 0)} bytes in, {self._num_bytes} out,"
            f" first after {first:.3f} s, all after {now - self._started:.3f} s"
        )
        fields: dict[str, Any] = {
            "method": self._scope["method"],
            "path": self._scope["path"][:100],
            "status": status,
            "bytes_in": state.get("num_body_bytes", 0),
            "bytes_out": self._num_bytes,
            "first_byte_seconds": round(first, 6),
            "seconds": round(now - self._started, 6),
            **state["traced"].log_fields(),
        }
        if "ticket" in state and (key := state["ticket"].caller.name) is not None:
            line += f", key {key}"
            fields["key"] = key
        if ignored := state.get("ignored_fields"):
            line += f", fields unread: {listed([name if name.isprintable() else ascii(name) for name in ignored])}"
            fields["unread_fields"] = ignored[:_MAX_NAMES]
        if error is not None:
            fields["stage"], fields["code"] = error_kind(error)
        extra = {FIELDS: fields}
        if error is None:
            logger.info("%s", line, extra=extra)
        elif error_kind(error)[0] == "ingress" and status < 500:
            logger.info("%s: %s", line, error, extra=extra)
        else:
            logger.error("%s: %s", line, error, exc_info=error, extra=extra)
