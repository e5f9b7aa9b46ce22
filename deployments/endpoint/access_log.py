"""Logs one line for each finished request, and counts each failed one in the metrics."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from raylens.deployments.endpoint.errors import error_kind
from raylens.deployments.endpoint.page_route import PREFIX
from raylens.deployments.server_log import FIELDS

logger = logging.getLogger(f"ray.serve.{__name__}")

_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/dashboard/data"})
"""Programs poll these every few seconds, and a page brings dozens of files. The log shows only their failures, and none
while the stages start."""
_LINE = (
    "{method} {path} {status} {request_id}: {bytes_in} bytes in, {bytes_out} out,"
    " first after {first_byte_seconds:.3f} s, all after {seconds:.3f} s"
)
_MAX_NAMES = 20


def listed(names: Sequence[str]) -> str:
    """Joins the names, and abbreviates a long list, for a log line or a header."""
    told = ", ".join(names[:_MAX_NAMES])
    return told if len(names) <= _MAX_NAMES else f"{told}, and {len(names) - _MAX_NAMES} more"


def is_quiet(scope: Scope) -> bool:
    return scope["path"] in _QUIET_PATHS or scope["path"].startswith(PREFIX)


@contextmanager
def log_entry(scope: Scope, count_error: Callable[[str, str], None]) -> Iterator["Entry"]:
    """Logs one request when the block ends. Counts its error, `scope["state"]["error"]`, outside the polled paths."""
    entry = Entry(scope)
    try:
        yield entry
    finally:
        error = scope["state"].get("error")
        if error is not None and not is_quiet(scope):
            count_error(*error_kind(error))
        entry.write(error)


class Entry:
    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._started = time.perf_counter()
        self._first_byte: float | None = None
        self._status: int | None = None
        self._num_bytes = 0

    @property
    def has_begun_well(self) -> bool:
        """Whether a successful answer has begun. A later error breaks it off."""
        return self._first_byte is not None and self._status is not None and self._status < 400

    def status(self, error: Exception | None) -> int:
        """Returns the answer's status, or without an answer: 500 after an error, 499 if the client left."""
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
        now, scope, state = time.perf_counter(), self._scope, self._scope["state"]
        is_failure = self._status is None or self._status >= 500
        if is_quiet(scope) and (not is_failure or state.get("is_starting")):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"][:100],
            "status": self.status(error),
            "bytes_in": state.get("num_body_bytes", 0),
            "bytes_out": self._num_bytes,
            "first_byte_seconds": round((self._first_byte or now) - self._started, 6),
            "seconds": round(now - self._started, 6),
        }
        line = _LINE.format(request_id=state["request_id"], **fields)
        fields |= state["traced"].log_fields()
        if "ticket" in state and (key := state["ticket"].caller.name) is not None:
            line += f", key {key}"
            fields["key"] = key
        if ignored := state.get("ignored_fields"):
            line += f", fields unread: {listed([name if name.isprintable() else ascii(name) for name in ignored])}"
            fields["unread_fields"] = ignored[:_MAX_NAMES]
        is_ours = False
        if error is not None:
            line += f": {error}"
            fields["stage"], fields["code"] = error_kind(error)
            is_ours = fields["stage"] != "ingress" or fields["status"] >= 500
        level = logging.ERROR if is_ours else logging.INFO
        logger.log(level, "%s", line, exc_info=error if is_ours else None, extra={FIELDS: fields})
