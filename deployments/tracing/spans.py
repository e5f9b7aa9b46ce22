"""The spans of this process, made by OpenTelemetry's SDK. Nothing is recorded without a configured collector.

Spans of stages are created afterwards from the measured times (`StageTime`), so both agree, and tracing adds no work
inside a stage. Only a span with children starts before its work."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.server_log import FIELDS
from raylens.preprocess.schema import StageTime

logger = logging.getLogger(f"ray.serve.{__name__}")

Attribute = str | bool | int | float | Sequence[str]
_NANOSECONDS = 10**9
_W3C = TraceContextTextMapPropagator()
_MOST_CHARS = 512
"""W3C's limit of both headers."""

TraceHeaders = dict[str, list[str]]
"""The headers `traceparent` and `tracestate` of a request, each with all its values."""


def trace_headers(values: Mapping[str, list[str]]) -> TraceHeaders:
    """Returns the valid headers. By W3C's rules, an invalid trace context is ignored and no error."""
    parents, states = values["traceparent"], values["tracestate"]
    if len(parents) != 1 or len(parents[0]) > _MOST_CHARS:
        return {}
    return {"traceparent": parents} | ({"tracestate": states} if sum(map(len, states)) <= _MOST_CHARS - 32 else {})


class OpenSpan:
    """A span that has not ended. `context`: for its children. The default `span` records nothing."""

    def __init__(self, context: RequestContext, span: Span = INVALID_SPAN) -> None:
        self.context = context
        self._span = span

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(_encodable(attributes))

    def link(self, other: RequestContext) -> None:
        """Links the span to another span that did this one's work."""
        if other.is_sampled:
            self._span.add_link(get_current_span(_parent(other)).get_span_context())

    def note_error(self, error: BaseException, *, is_failure: bool = True) -> None:
        """`is_failure`: whether the span failed; False for a client's mistake."""
        message = _text(str(error))
        self._span.record_exception(error, {"exception.message": message})
        if is_failure:
            self._span.set_status(StatusCode.ERROR, message)


class Spans:
    """Creates the spans of this process. `provider` records them and samples requests; without a provider, contexts are
    only passed on. `flush` sends the pending spans."""

    def __init__(self, provider: TracerProvider | None = None, flush: Callable[[], object] = lambda: None) -> None:
        self._is_on = provider is not None
        off = TracerProvider(sampler=ALWAYS_OFF, resource=Resource.get_empty(), shutdown_on_exit=False)
        self._tracer = (provider or off).get_tracer("raylens")
        self.flush = flush

    @contextmanager
    def root(
        self, request_id: str, headers: TraceHeaders, name: str, attributes: Mapping[str, Attribute]
    ) -> Iterator[OpenSpan]:
        """Opens a client request's span, which lasts as long as the block. It joins the client's trace if the `headers`
        name one. Unrecorded requests have trace ids, too."""
        span = self._tracer.start_span(name, _W3C.extract(headers), SpanKind.SERVER, _encodable(attributes))
        try:
            yield OpenSpan(_context_of(request_id, span), span)
        finally:
            span.end()

    @contextmanager
    def span(
        self, name: str, context: RequestContext, attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[OpenSpan]:
        """Opens a span that lasts as long as the block and fails with it."""
        if not (self._is_on and context.is_sampled):
            yield OpenSpan(context)
            return
        span = self._tracer.start_span(name, _parent(context), attributes=_encodable(attributes or {}))
        own = OpenSpan(_context_of(context.request_id, span), span)
        try:
            yield own
        except Exception as error:
            own.note_error(error)
            raise
        finally:
            span.end()

    def record(
        self, context: RequestContext, times: Sequence[StageTime], attributes: Mapping[str, Attribute] | None = None
    ) -> None:
        """Creates a span for each of the `times`, as a child of the context's span. With `--log-level debug`, also logs
        the times."""
        if logger.isEnabledFor(logging.DEBUG):
            with in_request(context):
                for one in times:
                    fields = {"stage": one.stage, "seconds": one.seconds}
                    logger.debug("%s took %.6f s", one.stage, one.seconds, extra={FIELDS: fields})
        if not (times and self._is_on and context.is_sampled):
            return
        parent = _parent(context)
        for one in times:
            start = int(one.started_at * _NANOSECONDS)
            span = self._tracer.start_span(one.stage, parent, attributes=attributes, start_time=start)
            span.end(start + int(one.seconds * _NANOSECONDS))


def _context_of(request_id: str, span: Span) -> RequestContext:
    own = span.get_span_context()
    if not own.is_valid:  # the operator has disabled the SDK, see `OTEL_SDK_DISABLED`
        return RequestContext(request_id)
    traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
    return RequestContext(request_id, traceparent, own.trace_state.to_header())


def _parent(context: RequestContext) -> Context:
    return _W3C.extract({"traceparent": context.traceparent, "tracestate": context.tracestate})


def _encodable(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {key: _encodable_value(value) for key, value in attributes.items()}


def _encodable_value(value: Attribute) -> Attribute:
    if isinstance(value, str):
        return _text(value)
    return [_text(one) for one in value] if isinstance(value, Sequence) else value


def _text(text: str) -> str:
    """Returns text that a message can carry: an error may quote half a surrogate pair from a client."""
    return text if text.isascii() else text.encode(errors="replace").decode()
