"""Spans and contexts of one process: what is made of stage times, and when nothing is."""

import socket
import time

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from raylens.deployments.config import TracingConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.request_context import NO_REQUEST, RequestContext
from raylens.deployments.tracing.export import is_configured, spans_of
from raylens.deployments.tracing.spans import Attribute, Spans, trace_headers
from raylens.preprocess.schema import StageTime
from tests.otlp_collector import Received, collecting, received
from tests.waiting import wait_until

TRACE_ID, SPAN_ID = "ab" * 16, "cd" * 8
SAMPLED = RequestContext("r", f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=1")
UNSAMPLED = RequestContext("r", f"00-{TRACE_ID}-{SPAN_ID}-00")
HEADERS = {"traceparent": [SAMPLED.traceparent], "tracestate": ["vendor=1"]}
VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_TRACES_SAMPLER",
)


class Recorded:
    """Spans, and what became of them."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(provider)

    @property
    def ended(self) -> list[Received]:
        return received(encode_spans(self._exporter.get_finished_spans()), host="")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_stage_time_becomes_a_span_of_the_same_moments() -> None:
    recorded = Recorded()
    recorded.spans.record(SAMPLED, [StageTime("encode", 1_795_690_140.25, 0.125)], {"n": 2})
    (span,) = recorded.ended
    assert (span.name, span.seconds) == ("encode", 0.125)
    assert span.start == pytest.approx(1_795_690_140.25, abs=1e-6)
    assert span.attributes == {"n": 2}
    assert (span.trace_id, span.parent_id, span.tracestate) == (TRACE_ID, SPAN_ID, "vendor=1")
    assert len(span.span_id) == 16


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
    assert (child.parent_id, item.span_id) == (context.span_id, context.span_id)
    assert (child.status, item.status) == (0, Status.STATUS_CODE_ERROR)
    assert item.events == ["exception"]


@pytest.mark.parametrize("context", [UNSAMPLED, NO_REQUEST])
def test_what_nobody_collects_is_not_made(context: RequestContext) -> None:
    recorded = Recorded()
    with recorded.spans.span("item", context) as span:
        assert span.context is context
        span.describe({"a": 1})
        span.link(SAMPLED)
        recorded.spans.record(context, [StageTime("encode", 1.0, 1.0)])
    assert recorded.ended == []


def test_without_a_collector_a_request_has_the_ids_of_a_trace_nevertheless() -> None:
    with Spans().root("r", {}, "POST", {}) as span:
        assert len(span.context.trace_id) == 32
        assert len(span.context.span_id) == 16
        assert not span.context.is_sampled
    with Spans().root("r", HEADERS, "POST", {}) as span:
        assert (span.context.trace_id, span.context.tracestate) == (TRACE_ID, "vendor=1")
        assert not span.context.is_sampled
        assert span.context.span_id != SPAN_ID


def test_where_the_sdk_is_disabled_a_request_has_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Spans().root("r", {}, "POST", {}) as span:
        assert span.context == RequestContext("r")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_where_the_client_has_not(ratio: float) -> None:
    recorded = Recorded(ratio)
    with recorded.spans.root("r", {}, "POST", {}) as span:
        assert span.context.is_sampled == bool(ratio)
    with recorded.spans.root("r", HEADERS, "POST", {}) as span:
        assert span.context.is_sampled, "its client has decided"


@pytest.mark.long
def test_a_tenth_of_the_requests_is_traced_where_nothing_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"

    def share(ratio: float | None = None) -> float:
        spans = spans_of(TracingConfig(endpoint=endpoint, sample_ratio=ratio), "Encode#1")
        sampled = 0
        for _ in range(1000):
            with spans.root("r", {}, "POST", {}) as span:
                sampled += span.context.is_sampled
        return sampled / 1000

    assert share() == pytest.approx(0.1, abs=0.05)
    assert share(0.0) == 0
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    assert share() == 1
    assert share(0.0) == 0, "the setting goes before the variable"


def test_what_a_message_cannot_carry_costs_no_other_span() -> None:
    """Half a surrogate pair, which JSON of a client may contain, and an error may quote."""
    recorded = Recorded()
    with recorded.spans.span("item", SAMPLED, {"model": "caf\u00e9 \ud800", "tags": ["\ud800", "b"]}) as span:
        span.note_error(ValueError("no \ud800"))
    (item,) = recorded.ended
    assert item.attributes == {"model": "café ?", "tags": ["?", "b"]}
    assert item.events == ["exception"]


def test_attributes_keep_their_types() -> None:
    recorded = Recorded()
    attributes: dict[str, Attribute] = {
        "text": "a",
        "yes": True,
        "no": False,
        "number": 2**40,
        "share": 0.5,
        "list": ["a", "b"],
    }
    with recorded.spans.span("item", SAMPLED, attributes) as span:
        span.describe({"late": 1})
        span.link(RequestContext("other", f"00-{TRACE_ID}-{'ef' * 8}-01"))
        span.link(UNSAMPLED)
    (item,) = recorded.ended
    assert item.attributes == {**attributes, "late": 1}
    assert [type(value) for value in item.attributes.values()] == [str, bool, bool, int, float, list, int]
    assert item.links == ["ef" * 8]


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_flush_sends_what_waits_but_does_not_wait_for_a_collector_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    port = free_port()
    spans = spans_of(TracingConfig(endpoint=f"http://127.0.0.1:{port}"), "Encode#1")
    with collecting(port) as collector:
        spans.record(SAMPLED, [StageTime("encode", 1.0, 1.0)])
        spans.flush()
        assert [span.name for span in collector.spans] == ["encode"]
    spans.record(SAMPLED, [StageTime("encode", 1.0, 1.0)])
    started = time.monotonic()
    spans.flush()
    assert time.monotonic() - started < 6  # the exporter itself tries for ten seconds


def test_a_protocol_that_is_not_spoken_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    spans_of(TracingConfig(), "Encode#1")  # nobody asks for traces
    with pytest.raises(RuntimeError, match="gRPC only"):
        spans_of(TracingConfig(endpoint="http://127.0.0.1:4317"), "Encode#1")
