"""The spans of this process, for OpenTelemetry. Where no collector is configured, nothing is made.

Stages measure their times anyway (`StageTime`). Spans are made of these figures afterwards, so that both agree, and
nothing happens while a stage works. Only what others are children of begins as a span."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.server_log import FIELDS
from raylens.deployments.tracing.records import Attribute, EndedSpan, OpenSpan, SpanRecord, StageSpans
from raylens.preprocess.schema import StageTime

logger = logging.getLogger(f"ray.serve.{__name__}")

_W3C = TraceContextTextMapPropagator()
_IDS = RandomIdGenerator()
_MOST_CHARS = 512
"""W3C's limit of both headers."""

TraceHeaders = dict[str, list[str]]
"""The headers `traceparent` and `tracestate` of a request, each with all its values."""


def trace_headers(values: Mapping[str, list[str]]) -> TraceHeaders:
    """Returns those that can be read. W3C: a trace that cannot be read is not the request's, and is no error."""
    parents, states = values["traceparent"], values["tracestate"]
    if len(parents) != 1 or len(parents[0]) > _MOST_CHARS:
        return {}
    return {"traceparent": parents} | ({"tracestate": states} if sum(map(len, states)) <= _MOST_CHARS - 32 else {})


class Spans:
    """Makes the spans of this process. `collect`: takes the record of each span; without it none is made, and contexts
    are only handed on. `sampler`: decides which requests are collected, with all that belongs to them. `flush`: sends
    the records that wait to be sent."""

    def __init__(
        self,
        collect: Callable[[SpanRecord], None] | None = None,
        sampler: Sampler | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._collect = collect
        self._sampler = sampler
        self.flush = flush

    @contextmanager
    def root(
        self, request_id: str, headers: TraceHeaders, name: str, attributes: Mapping[str, Attribute]
    ) -> Iterator[OpenSpan]:
        """A span for a request of a client that lasts as long as the block. It belongs to the client's trace if the
        `headers` name one. A request that is not collected has the ids of a trace nevertheless."""
        given = _W3C.extract(headers)
        parent = trace.get_current_span(given).get_span_context()
        trace_id, flags, parent_id = parent.trace_id, parent.trace_flags & TraceFlags.RANDOM_TRACE_ID, ""
        if parent.is_valid:
            parent_id = f"{parent.span_id:016x}"
        else:
            trace_id, flags = _IDS.generate_trace_id(), TraceFlags.RANDOM_TRACE_ID
        state, own = parent.trace_state, dict(attributes)
        if self._sampler is not None:
            result = self._sampler.should_sample(given, trace_id, name, SpanKind.SERVER, attributes)
            state, own = result.trace_state or state, {**own, **result.attributes}
            flags |= TraceFlags.SAMPLED if result.decision is Decision.RECORD_AND_SAMPLE else 0
        traceparent = f"00-{trace_id:032x}-{_IDS.generate_span_id():016x}-{flags:02x}"
        context = RequestContext(request_id, traceparent, state.to_header())
        span = OpenSpan(context, context.is_sampled, name, parent_id, is_server=True, attributes=own)
        try:
            yield span
        finally:
            self._end(span)

    @contextmanager
    def span(
        self, name: str, context: RequestContext, attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[OpenSpan]:
        """A span that lasts as long as the block, and fails with it."""
        if self._collect is None or not context.is_sampled:
            yield OpenSpan(context)
            return
        traceparent = f"{context.traceparent[:36]}{_IDS.generate_span_id():016x}{context.traceparent[52:]}"
        own = RequestContext(context.request_id, traceparent, context.tracestate)
        span = OpenSpan(own, True, name, context.span_id, attributes=dict(attributes or {}))
        try:
            yield span
        except Exception as error:
            span.note_error(error)
            raise
        finally:
            self._end(span)

    def _end(self, span: OpenSpan) -> None:
        if span.is_recorded and self._collect is not None:
            self._collect(EndedSpan(span, time.time_ns()))

    def record(
        self, context: RequestContext, times: Sequence[StageTime], attributes: Mapping[str, Attribute] | None = None
    ) -> None:
        """Makes a span of each of the `times`, a child of the context's. It reads them later, so that they may not
        change any more. The log has them, too, if it is to have all (`--log-level debug`)."""
        _log(context, times)
        if times and self._collect is not None and context.is_sampled:
            self._collect(StageSpans(context, times, attributes or {}))

    def record_within(self, span: OpenSpan, times: Sequence[StageTime]) -> None:
        """Makes a span of each of the `times`, a child of `span`, which has not ended. They are sent with it, which
        costs less than `record`."""
        _log(span.context, times)
        if span.is_recorded:
            span.times += times


def _log(context: RequestContext, times: Sequence[StageTime]) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    with in_request(context):
        for one in times:
            fields = {"stage": one.stage, "seconds": one.seconds}
            logger.debug("%s took %.6f s", one.stage, one.seconds, extra={FIELDS: fields})
