"""A request's id and trace context, which travel through all processes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`request_id`: the answer's header X-Request-Id. `traceparent` and `tracestate` (W3C Trace Context): the parent of
    the receiver's spans; empty without a trace."""

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]  # 32 hex digits, or empty

    @property
    def span_id(self) -> str:
        return self.traceparent[36:52]  # 16 hex digits, or empty

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.traceparent[53:55] or "0", 16) & 1)


NO_REQUEST = RequestContext()
_current: ContextVar[RequestContext | None] = ContextVar("raylens_request", default=None)


@contextmanager
def in_request(context: RequestContext) -> Iterator[None]:
    """Adds the request's ids to the log records of the block and of tasks that it starts."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def note_ids(record: logging.LogRecord) -> bool:
    """A log filter that passes every record. Adds the current request's ids: `request_id`, `trace_id` and `span_id`."""
    if (context := _current.get()) is not None:
        record.request_id = context.request_id
        if context.traceparent:
            record.trace_id, record.span_id = context.trace_id, context.span_id
    return True
