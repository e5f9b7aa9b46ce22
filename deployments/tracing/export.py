"""Where the spans of this process go: to the collector that the configuration or OpenTelemetry's variables name."""

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
    from opentelemetry.sdk.trace.sampling import Sampler

_DEFAULT_SAMPLE_RATIO = 0.1
"""Keeps the cost below 2 % of the throughput. Tracing of every request takes 6 %."""
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SAMPLER_VARIABLE = "OTEL_TRACES_SAMPLER"
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_SELDOM_SECONDS = 60.0
_FLUSH_SECONDS = 2.0


def spans_of(config: TracingConfig, process: str) -> Spans:
    """Returns what makes this process's spans. `process`: its name. Raises RuntimeError where tracing is configured,
    but not possible."""
    if not is_configured(config):
        return Spans()
    protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)), "grpc")
    if protocol != "grpc":
        raise RuntimeError(f"traces are sent by OTLP over gRPC only (port 4317), not {protocol}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "raylens"),
        "service.instance.id": process,
        "raylens.deployment": process.partition("#")[0],
        "host.name": socket.gethostname(),
    }
    provider = TracerProvider(sampler=_sampler(config), resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
    logging.getLogger(_EXPORTER_LOGGER).addFilter(_Seldom())
    return Spans(provider, partial(_flush, provider))


def _flush(provider: "TracerProvider") -> None:
    """Gives up where the collector does not answer in time, for which the provider itself would wait for longer."""
    thread = threading.Thread(target=provider.force_flush, daemon=True)
    thread.start()
    thread.join(_FLUSH_SECONDS)


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

    if config.sample_ratio is None and os.environ.get(_SAMPLER_VARIABLE):
        return None
    return ParentBasedTraceIdRatio(_DEFAULT_SAMPLE_RATIO if config.sample_ratio is None else config.sample_ratio)
