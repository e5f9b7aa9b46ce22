"""A collector of OpenTelemetry: the protocol's own gRPC service, which keeps what it gets.

`python -m tests.otlp_collector ADDRESS` collects at that address and port until it is killed, and prints each span as a
line of JSON."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire. Ids in hex digits, times in seconds. `resource`: what the process that sent it
    says of itself. `host`: the address that it came from. `status`: the number of the protocol, 2 for an error.
    `links`: the spans' ids."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: float
    end: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    host: str
    status: int
    events: list[str]
    links: list[str]
    tracestate: str

    @property
    def place(self) -> str:
        """The process that sent it."""
        return str(self.resource["service.instance.id"])

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Collector(TraceServiceServicer):
    def __init__(self, tell: Callable[[Received], object] = lambda span: None) -> None:
        """`tell` is called with each span that comes."""
        self.spans: list[Received] = []
        self._tell = tell

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for span in received(request, host=context.peer().split(":")[1]):  # ipv4:127.0.0.1:4711
            self.spans.append(span)
            self._tell(span)
        return ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]


def received(request: Any, host: str) -> list[Received]:
    """Returns the spans of a message of the protocol."""
    return [
        _received(span, _attributes(resource.resource.attributes), host)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@contextmanager
def collecting(port: int) -> Iterator[Collector]:
    """Collects on a port of the loopback interface while the block runs."""
    collector = Collector()
    server = _started(collector, f"127.0.0.1:{port}")
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _started(collector: Collector, address: str) -> Any:
    server = grpc.server(ThreadPoolExecutor(2))
    add_service: Any = add_TraceServiceServicer_to_server  # without types
    add_service(collector, server)
    server.add_insecure_port(address)
    server.start()
    return server


def _received(span: Any, resource: dict[str, Any], host: str) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _attributes(span.attributes),
        resource,
        host,
        span.status.code,
        [event.name for event in span.events],
        [link.span_id.hex() for link in span.links],
        span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _print(span: Received) -> None:
    print(f"{json.dumps(asdict(span))}\n", end="", flush=True)


if __name__ == "__main__":
    _started(Collector(_print), sys.argv[1]).wait_for_termination()
