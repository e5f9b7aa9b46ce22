"""Sends records by OpenTelemetry's protocol (OTLP).

The SDK would first make an object of its own of each span. A message of such objects takes eight times as long to make,
on a thread that shares the interpreter with the model's."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from raylens.deployments.request_context import RequestContext
from raylens.deployments.tracing.records import NANOSECONDS, Attribute, EndedSpan, SpanRecord, StageSpans
from raylens.preprocess.schema import StageTime

_SCOPE = "raylens"
_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class RecordExporter(OTLPSpanExporter):
    """Sends records to `endpoint`, None for that of OpenTelemetry's variables. `resource`: the attributes of the
    process. The SDK's own exporter does it, which tries again where the collector is away for a moment."""

    def __init__(self, endpoint: str | None, resource: Mapping[str, Any]) -> None:
        super().__init__(endpoint=endpoint)
        self._resource_attributes = resource

    def _translate_data(self, data: Sequence[SpanRecord]) -> ExportTraceServiceRequest:  # type: ignore[override]
        return export_request(data, self._resource_attributes)


def export_request(records: Iterable[SpanRecord], resource: Mapping[str, Attribute]) -> ExportTraceServiceRequest:
    """Returns the message with the spans of all `records`. `resource`: the attributes of the process."""
    message = ExportTraceServiceRequest()
    of_resource = message.resource_spans.add(resource={"attributes": _attributes(resource)})
    spans = of_resource.scope_spans.add(scope={"name": _SCOPE}).spans
    for record in records:
        if isinstance(record, StageSpans):
            _add_stages(spans, record.parent, record.times, record.attributes)
        else:
            _add_span(spans, record)
    return message


def _add_stages(spans: Any, parent: RequestContext, times: Iterable[StageTime], own: Mapping[str, Attribute]) -> None:
    ids, attributes = _ids(parent), _attributes(own)
    parent_id = ids.pop("span_id")
    for one in times:
        start = int(one.started_at * NANOSECONDS)
        spans.add(
            **ids,
            span_id=random.randbytes(8),
            parent_span_id=parent_id,
            name=one.stage,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=start,
            end_time_unix_nano=start + int(one.seconds * NANOSECONDS),
            attributes=attributes,
        )


def _add_span(spans: Any, record: EndedSpan) -> None:
    one = record.span
    spans.add(
        **_ids(one.context),
        parent_span_id=bytes.fromhex(one.parent_id),
        name=one.name,
        kind=Span.SPAN_KIND_SERVER if one.is_server else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=one.started_at,
        end_time_unix_nano=record.ended_at,
        attributes=_attributes(one.attributes),
        links=[_ids(linked) for linked in one.links],
        events=[
            {"name": "exception", "time_unix_nano": error.happened_at, "attributes": _attributes(error.attributes)}
            for error in one.errors
        ],
        status=None if one.failure is None else {"code": Status.STATUS_CODE_ERROR, "message": _text(one.failure)},
    )
    if one.times:
        _add_stages(spans, one.context, one.times, {})


def _ids(context: RequestContext) -> dict[str, Any]:
    """Returns what a span and a link to it have in common. The parents of most are of other processes, so all count as
    remote."""
    return {
        "trace_id": bytes.fromhex(context.trace_id),
        "span_id": bytes.fromhex(context.span_id),
        "trace_state": context.tracestate,
        "flags": _REMOTE | context.trace_flags,
    }


def _attributes(attributes: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Attribute) -> dict[str, Any]:
    match value:
        case str():
            return {"string_value": _text(value)}
        case bool():
            return {"bool_value": value}
        case int():
            return {"int_value": value}
        case float():
            return {"double_value": value}
        case _:
            return {"array_value": {"values": [_value(one) for one in value]}}


def _text(text: str) -> str:
    """Returns what can be sent: an error's words may quote half a surrogate pair of a client's."""
    return text if text.isascii() else text.encode(errors="replace").decode()
