"""Exports this process's spans to the collector named by the configuration or by OpenTelemetry's variables."""

import logging
import os
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from raylens.deployments.config import TracingConfig
from raylens.deployments.tracing.spans import Spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_DEFAULT_SAMPLE_RATIO = 0.1
"""Keeps the cost below 2 % of the throughput. Tracing every request costs 6 %."""
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_SELDOM_SECONDS = 60.0
_FLUSH_SECONDS = 2.0


def spans_of(config: TracingConfig, process: str) -> Spans:
    """Returns the Spans of `process`. Raises RuntimeError if tracing is configured but impossible."""
    if not is_configured(config):
        return Spans()
    protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)), "grpc")
    if protocol != "grpc":
        raise RuntimeError(f"traces are sent by OTLP over gRPC only (port 4317), not {protocol}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    own = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "raylens"),
        "service.instance.id": process,
        "raylens.deployment": process.partition("#")[0],
        "host.name": socket.gethostname(),
    }
    ratio = config.sample_ratio
    if ratio is None and not os.environ.get("OTEL_TRACES_SAMPLER"):
        ratio = _DEFAULT_SAMPLE_RATIO
    sampler = None if ratio is None else ParentBasedTraceIdRatio(ratio)  # None: OpenTelemetry's variables decide
    provider = TracerProvider(sampler=sampler, resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
    logging.getLogger(_EXPORTER_LOGGER).addFilter(_Seldom())
    return Spans(provider, partial(_flush, provider))


def _flush(provider: "TracerProvider") -> None:
    """Gives up after a timeout; the provider itself would wait longer for a silent collector."""
    thread = threading.Thread(target=provider.force_flush, daemon=True)
    thread.start()
    thread.join(_FLUSH_SECONDS)


class _Seldom(logging.Filter):
    """Rate limit: while the collector is unreachable, the exporter logs an error every second."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        passes = record.levelno >= logging.ERROR and time.monotonic() >= self._next_at
        if passes:
            self._next_at = time.monotonic() + _SELDOM_SECONDS
        return passes


def is_configured(config: TracingConfig) -> bool:
    return config.endpoint is not None or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
