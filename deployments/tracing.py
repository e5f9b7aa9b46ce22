"""The spans of this process, for OpenTelemetry. Where no collector is configured, nothing is made.

Stages measure their times anyway (`preprocess.schema.StageTime`). Spans are made of these figures afterwards, so that
both agree, and nothing happens while a stage works. Only what others are children of begins as a span."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.config import TracingConfig
from deployments.request_context import RequestContext, in_request
from deployments.server_log import FIELDS
from preprocess.schema import StageTime

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import Sampler

logger = logging.getLogger(f"ray.serve.{__name__}")

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DELAY_VARIABLE = "OTEL_BSP_SCHEDULE_DELAY"
_DELAY_MS = 1000.0
"""How long spans wait to be sent together. What a replica has not sent when it ends is lost."""
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_SELDOM_SECONDS = 60.0
_SCOPE = InstrumentationScope("raylens")
_W3C = TraceContextTextMapPropagator()
_MOST_CHARS = 512
"""W3C's limit of both headers."""

Attribute = str | bool | int | float | Sequence[str]
NANOSECONDS = 10**9


class OpenSpan:
    """A span that is not over. `context`: what its children get. It may stand for no span, where none is collected."""

    def __init__(self, span: trace.Span | None, context: RequestContext) -> None:
        self._span = span
        self.context = context

    @property
    def is_recorded(self) -> bool:
        return self._span is not None and self._span.is_recording()

    def name(self, name: str) -> None:
        if self._span is not None:
            self._span.update_name(name)

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def link(self, other: RequestContext) -> None:
        """Says that the work of another span is this one's, too."""
        if self._span is not None and other.is_sampled:
            self._span.add_link(_span_context(other))

    def note_error(self, error: BaseException, *, is_failure: bool = True) -> None:
        """`is_failure`: whether the span failed, or only tells of a client's mistake."""
        if self._span is not None:
            self._span.record_exception(error)
            if is_failure:
                self._span.set_status(Status(StatusCode.ERROR, str(error)))


class Spans:
    """Makes the spans of this process. Without a `provider` it makes none, and only hands contexts on. `processor`:
    where the provider's spans go."""

    def __init__(self, provider: TracerProvider | None = None, processor: SpanProcessor | None = None) -> None:
        self._tracer = None if provider is None else provider.get_tracer(_SCOPE.name)
        self._resource = None if provider is None else provider.resource
        self._processor = processor
        self._ids = RandomIdGenerator()

    @contextmanager
    def root(
        self, request_id: str, headers: "TraceHeaders", name: str, attributes: Mapping[str, Attribute]
    ) -> Iterator[OpenSpan]:
        """A span for a request of a client that lasts as long as the block. It belongs to the client's trace if the
        `headers` name one. The sampler decides whether it is collected, and with it all that belongs to it."""
        parent = _W3C.extract(headers)
        if self._tracer is None:
            yield OpenSpan(None, _context_without_span(request_id, parent))
            return
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        try:
            yield OpenSpan(span, _context_of(span, request_id))
        finally:
            span.end()

    @contextmanager
    def span(
        self, name: str, context: RequestContext, attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[OpenSpan]:
        """A span that lasts as long as the block, and fails with it."""
        if self._tracer is None or not context.is_sampled:
            yield OpenSpan(None, context)
            return
        parent = trace.set_span_in_context(NonRecordingSpan(_span_context(context)))
        span = self._tracer.start_span(name, parent, attributes=attributes)
        open_span = OpenSpan(span, _context_of(span, context.request_id))
        try:
            yield open_span
        except Exception as error:
            open_span.note_error(error)
            raise
        finally:
            span.end()

    def record(
        self, context: RequestContext, times: Sequence[StageTime], attributes: Mapping[str, Attribute] | None = None
    ) -> None:
        """Makes a span of each of the `times`, a child of the context's. The log has them, too, if it is to have all
        (`--log-level debug`)."""
        if not times:
            return
        if logger.isEnabledFor(logging.DEBUG):
            with in_request(context):
                for one in times:
                    fields = {"stage": one.stage, "seconds": one.seconds}
                    logger.debug("%s took %.6f s", one.stage, one.seconds, extra={FIELDS: fields})
        if self._processor is None or not context.is_sampled:
            return
        parent = _span_context(context)
        for one in times:
            start, detail = int(one.started_at * NANOSECONDS), {"raylens.detail": one.detail} if one.detail else {}
            own = SpanContext(
                parent.trace_id, self._ids.generate_span_id(), False, parent.trace_flags, parent.trace_state
            )
            # Over from its beginning, so it needs nothing of what a tracer does for a span that is open.
            span = ReadableSpan(
                one.stage,
                own,
                parent,
                self._resource,
                {**(attributes or {}), **detail},
                instrumentation_scope=_SCOPE,
                start_time=start,
                end_time=start + int(one.seconds * NANOSECONDS),
            )
            self._processor.on_end(span)


TraceHeaders = dict[str, list[str]]
"""The headers `traceparent` and `tracestate` of a request, each with all its values."""


def trace_headers(values: Mapping[str, list[str]]) -> TraceHeaders:
    """Returns those that can be read. W3C: a trace that cannot be read is not the request's, and is no error."""
    parents, states = values["traceparent"], values["tracestate"]
    if len(parents) != 1 or len(parents[0]) > _MOST_CHARS:
        return {}
    return {"traceparent": parents} | ({"tracestate": states} if sum(map(len, states)) <= _MOST_CHARS - 32 else {})


def spans_of(config: TracingConfig, process: str) -> Spans:
    """Returns what makes this process's spans. `process`: its name. Raises RuntimeError where tracing is configured,
    but not possible."""
    if not is_configured(config):
        return Spans()
    protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)), "grpc")
    if protocol != "grpc":
        raise RuntimeError(f"traces are sent by OTLP over gRPC only (port 4317), not {protocol}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "raylens"),
        "service.instance.id": process,
        "raylens.deployment": process.partition("#")[0],
        "host.name": socket.gethostname(),
    }
    resource = Resource.create(own)
    provider = TracerProvider(sampler=_sampler(config), resource=_OneResource(resource.attributes, resource.schema_url))
    logging.getLogger(_EXPORTER_LOGGER).addFilter(_Seldom())
    delay = None if _DELAY_VARIABLE in os.environ else _DELAY_MS
    exporter = OTLPSpanExporter(endpoint=config.endpoint)
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=delay)
    provider.add_span_processor(processor)
    return Spans(provider, processor)


class _Seldom(logging.Filter):
    """Lets one record pass in a while. While the collector is away, the exporter complains every second."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        passes = record.levelno >= logging.ERROR and time.monotonic() >= self._next_at
        if passes:
            self._next_at = time.monotonic() + _SELDOM_SECONDS
        return passes


def is_configured(config: TracingConfig) -> bool:
    return config.endpoint is not None or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)


def _sampler(config: TracingConfig) -> "Sampler | None":
    """Returns None for what OpenTelemetry's own variables say."""
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    return None if config.sample_ratio is None else ParentBasedTraceIdRatio(config.sample_ratio)


class _OneResource(Resource):
    """The resource of all spans of this process. OpenTelemetry's own has a hash of its JSON, and the exporter asks for
    it with each span: a third of the time in which it encodes one."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _span_context(context: RequestContext) -> SpanContext:
    """Returns the span that the context names. Ours are well formed, unlike those of a client."""
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    flags = TraceFlags(context.trace_flags)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)


def _context_of(span: trace.Span, request_id: str) -> RequestContext:
    own = span.get_span_context()
    parent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
    return RequestContext(request_id, parent, own.trace_state.to_header())


def _context_without_span(request_id: str, parent: "Context") -> RequestContext:
    """Returns a context that is not collected. Logs and answers have the ids of a trace nevertheless."""
    given = trace.get_current_span(parent).get_span_context()
    trace_id = trace.format_trace_id(given.trace_id) if given.is_valid else secrets.token_hex(16)
    state = given.trace_state.to_header() if given.is_valid else ""
    return RequestContext(request_id, f"00-{trace_id}-{secrets.token_hex(8)}-00", state)
