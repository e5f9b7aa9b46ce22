"""What is noted of a span while requests are served, and the OpenTelemetry span that the exporter's thread makes of it.

OpenTelemetry's own spans take some 20 us to begin and end, and several times that where the model has just used the
processor's caches. A record takes a few, and the rest is done for many spans together."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from deployments.request_context import RequestContext
from preprocess.schema import StageTime

Attribute = str | bool | int | float | Sequence[str]
NANOSECONDS = 10**9
SCOPE = InstrumentationScope("raylens")
_IDS = RandomIdGenerator()
_UNSET = Status(StatusCode.UNSET)
_SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))
_MOST_AT_ONCE = 2000
"""Spans in one message. A collector takes 4 MiB; a request with thousands of prompts is one record."""


class SpanRecord(Protocol):
    """What waits for the exporter. `context`: of any span that is collected; a processor asks for no more of it."""

    context: ClassVar[SpanContext]

    def spans(self, resource: Resource) -> list[ReadableSpan]: ...


@dataclass(slots=True)
class OpenSpan:
    """A span that is not over. `context`: what its children get. Where `is_recorded` is False it stands for no span,
    and is only handed on."""

    context: RequestContext
    is_recorded: bool = False
    name: str = ""
    parent: SpanContext | None = None
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, Attribute] = field(default_factory=dict)
    _links: list[Link] = field(default_factory=list)
    _events: list[Event] = field(default_factory=list)
    _status: Status = _UNSET
    _started_at: int = field(default_factory=time.time_ns)

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        if self.is_recorded:
            self.attributes.update(attributes)

    def link(self, other: RequestContext) -> None:
        """Says that the work of another span is this one's, too."""
        if self.is_recorded and other.is_sampled:
            self._links.append(Link(span_context(other)))

    def note_error(self, error: BaseException, *, is_failure: bool = True) -> None:
        """`is_failure`: whether the span failed, or only tells of a client's mistake."""
        if not self.is_recorded:
            return
        # As text: the error itself would keep alive what its frames hold.
        kind = type(error)
        attributes = {
            "exception.type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            "exception.message": str(error),
            "exception.stacktrace": "".join(traceback.format_exception(error)),
        }
        self._events.append(Event("exception", attributes))
        if is_failure:
            self._status = Status(StatusCode.ERROR, str(error))

    def ended(self) -> "EndedSpan":
        return EndedSpan(self, time.time_ns())


@dataclass(slots=True)
class EndedSpan:
    """A span that is over since `ended_at`, in nanoseconds."""

    context: ClassVar[SpanContext] = _SAMPLED
    span: OpenSpan
    ended_at: int

    def spans(self, resource: Resource) -> list[ReadableSpan]:
        one = self.span
        return [
            ReadableSpan(
                one.name,
                span_context(one.context, is_remote=False),
                one.parent,
                resource,
                one.attributes,
                one._events,
                one._links,
                one.kind,
                status=one._status,
                start_time=one._started_at,
                end_time=self.ended_at,
                instrumentation_scope=SCOPE,
            )
        ]


@dataclass(slots=True)
class StageSpans:
    """A span of each of the `times`, a child of the `parent`'s."""

    context: ClassVar[SpanContext] = _SAMPLED
    parent: RequestContext
    times: Sequence[StageTime]
    attributes: Mapping[str, Attribute]

    def spans(self, resource: Resource) -> list[ReadableSpan]:
        parent = span_context(self.parent)
        return [self._span(one, parent, resource) for one in self.times]

    def _span(self, time: StageTime, parent: SpanContext, resource: Resource) -> ReadableSpan:
        start = int(time.started_at * NANOSECONDS)
        return ReadableSpan(
            time.stage,
            SpanContext(parent.trace_id, _IDS.generate_span_id(), False, parent.trace_flags, parent.trace_state),
            parent,
            resource,
            {**self.attributes, "raylens.detail": time.detail} if time.detail else self.attributes,
            instrumentation_scope=SCOPE,
            start_time=start,
            end_time=start + int(time.seconds * NANOSECONDS),
        )


class RecordExporter(SpanExporter):
    """Exports the spans of records by another exporter, all with the same `resource`."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource

    def export(self, spans: Sequence[SpanRecord]) -> SpanExportResult:  # type: ignore[override]
        own = [span for record in spans for span in record.spans(self._resource)]
        batches = [own[start : start + _MOST_AT_ONCE] for start in range(0, len(own), _MOST_AT_ONCE)]
        results = [self._exporter.export(batch) for batch in batches]
        return SpanExportResult.FAILURE if SpanExportResult.FAILURE in results else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def span_context(context: RequestContext, *, is_remote: bool = True) -> SpanContext:
    """Returns the span that the context names. Ours are well formed, unlike those of a client."""
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    flags = TraceFlags(context.trace_flags)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote, flags, state)
