"""Spans and contexts of one process: what is made of stage times, and when nothing is."""

import socket
import time
from typing import cast

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from deployments.config import TracingConfig
from deployments.local_cluster import free_port
from deployments.request_context import NO_REQUEST, RequestContext
from deployments.tracing.export import is_configured, spans_of
from deployments.tracing.records import NANOSECONDS, RecordExporter, SpanRecord
from deployments.tracing.spans import Spans, trace_headers
from preprocess.schema import StageTime
from tests.otlp_collector import collecting
from tests.waiting import wait_until

TRACE_ID, SPAN_ID = "ab" * 16, "cd" * 8
SAMPLED = RequestContext("r", f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=1")
UNSAMPLED = RequestContext("r", f"00-{TRACE_ID}-{SPAN_ID}-00")
HEADERS = {"traceparent": [SAMPLED.traceparent], "tracestate": ["vendor=1"]}
VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Recorded:
    """Spans, and what became of them."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self._processor = SimpleSpanProcessor(RecordExporter(self._exporter, Resource.create({"a": "b"})))
        self.spans = Spans(self._collect, ParentBasedTraceIdRatio(ratio))

    def _collect(self, record: SpanRecord) -> None:
        self._processor.on_end(cast("ReadableSpan", record))

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_stage_time_becomes_a_span_of_the_same_moments() -> None:
    recorded = Recorded()
    recorded.spans.record(SAMPLED, [StageTime("encode", 1_795_690_140.25, 0.125, detail="seen")], {"n": 2})
    (span,) = recorded.ended
    assert (span.name, span.start_time) == ("encode", int(1_795_690_140.25 * NANOSECONDS))
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == 0.125 * NANOSECONDS
    assert dict(span.attributes or {}) == {"n": 2, "raylens.detail": "seen"}
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


def test_children_hang_below_a_span_that_fails_with_its_block() -> None:
    recorded = Recorded()
    contexts = []

    def fail() -> None:
        with recorded.spans.span("item", SAMPLED) as span:
            contexts.append(span.context)
            recorded.spans.record(span.context, [StageTime("encode", 1.0, 1.0)])
            raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        fail()
    (context,) = contexts
    assert (context.request_id, context.trace_id, context.tracestate) == ("r", TRACE_ID, "vendor=1")
    assert context.span_id != SPAN_ID
    child, item = recorded.ended
    assert child.parent is not None
    assert item.context is not None
    assert child.parent.span_id == item.context.span_id
    assert not item.status.is_ok
    assert [event.name for event in item.events] == ["exception"]


@pytest.mark.parametrize("context", [UNSAMPLED, NO_REQUEST])
def test_what_nobody_collects_is_not_made(context: RequestContext) -> None:
    recorded = Recorded()
    with recorded.spans.span("item", context) as span:
        assert span.context is context
        span.describe({"a": 1})
        span.link(SAMPLED)
        recorded.spans.record(context, [StageTime("encode", 1.0, 1.0)])
    assert recorded.ended == ()


def test_without_a_collector_a_request_has_the_ids_of_a_trace_nevertheless() -> None:
    with Spans().root("r", {}, "POST", {}) as span:
        assert len(span.context.trace_id) == 32
        assert len(span.context.span_id) == 16
        assert not span.context.is_sampled
    with Spans().root("r", HEADERS, "POST", {}) as span:
        assert (span.context.trace_id, span.context.tracestate) == (TRACE_ID, "vendor=1")
        assert not span.context.is_sampled
        assert span.context.span_id != SPAN_ID


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_where_the_client_has_not(ratio: float) -> None:
    recorded = Recorded(ratio)
    with recorded.spans.root("r", {}, "POST", {}) as span:
        assert span.context.is_sampled == bool(ratio)
    with recorded.spans.root("r", HEADERS, "POST", {}) as span:
        assert span.context.is_sampled, "its client has decided"


def test_headers_that_cannot_be_read_are_none() -> None:
    def read(parents: list[str], states: list[str] | None = None) -> object:
        return trace_headers({"traceparent": parents, "tracestate": states or []})

    assert read([SAMPLED.traceparent], ["a=1", "b=2"]) == {
        "traceparent": [SAMPLED.traceparent],
        "tracestate": ["a=1", "b=2"],
    }
    assert read([]) == read([SAMPLED.traceparent] * 2) == read(["x" * 600]) == {}
    assert read([SAMPLED.traceparent], ["a=" + "1" * 600]) == {"traceparent": [SAMPLED.traceparent]}


def test_a_setting_or_a_variable_turns_tracing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_configured(TracingConfig())
    assert is_configured(TracingConfig(endpoint="http://127.0.0.1:4317"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert is_configured(TracingConfig())


def test_a_collector_that_is_away_is_named_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    endpoint = f"http://127.0.0.1:{free_port()}"
    spans = spans_of(TracingConfig(endpoint=endpoint), "Encode#1")
    for _ in range(10):
        spans.record(SAMPLED, [StageTime("encode", 1.0, 1.0)])
        time.sleep(0.4)
    (record,) = [one for one in caplog.records if "opentelemetry" in one.name]
    assert "Failed to export traces" in record.getMessage()


def test_spans_say_which_process_made_them() -> None:
    port = free_port()
    with collecting(port) as collector:
        spans_of(TracingConfig(endpoint=f"http://127.0.0.1:{port}"), "Encode#1").record(
            SAMPLED, [StageTime("encode", 1.0, 1.0)]
        )
        wait_until(lambda: bool(collector.spans))
    resource = collector.spans[0].resource
    assert (resource["service.name"], resource["service.instance.id"]) == ("raylens", "Encode#1")
    assert (resource["raylens.deployment"], resource["host.name"]) == ("Encode", socket.gethostname())


def test_a_protocol_that_is_not_spoken_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    spans_of(TracingConfig(), "Encode#1")  # nobody asks for traces
    with pytest.raises(RuntimeError, match="gRPC only"):
        spans_of(TracingConfig(endpoint="http://127.0.0.1:4317"), "Encode#1")
