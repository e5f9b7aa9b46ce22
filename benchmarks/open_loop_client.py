"""An open-loop client on one thread: it sends each request at its time, whether or not earlier ones are answered.

It records received data with time stamps, and parses all of it after the last answer has ended. So it uses little of
the CPU that it shares with the server, and reports its own use."""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.event_stream import events_of, request_bytes, text_of
from benchmarks.streaming_client import Content, chat_body

_RECEIVE_BYTES = 2**16
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Sending:
    """A request for exactly `num_tokens` tokens, to be sent `moment` seconds after the start."""

    moment: float
    body: bytes
    num_tokens: int

    @classmethod
    def of(cls, moment: float, model: str, content: Content, num_tokens: int, **fields: Any) -> "Sending":
        """`fields`: further fields of the request."""
        body = chat_body(model, content, num_tokens) | {"stage_timings": True} | fields
        return cls(moment, json.dumps(body).encode(), num_tokens)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Seconds from the load's start until the request was sent, its first text arrived and its last text arrived.
    `timings`: the server's own."""

    sent: float
    first: float
    last: float
    num_tokens: int
    num_pieces: int
    num_bytes: int
    """Received bytes, including headers."""
    prompt_tokens: int
    timings: dict[str, Any]

    @property
    def time_to_first_token(self) -> float:
        return self.first - self.sent

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between tokens. Raises ZeroDivisionError for an answer of one token."""
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class Stream:
    """An open request. `received`: each part of its answer, with the seconds since the load's start."""

    connection: socket.socket
    sending: Sending
    sent: float
    unsent: memoryview
    received: list[tuple[float, bytes]] = field(default_factory=list)


def send_open_loop(url: str, sendings: Sequence[Sending]) -> tuple[list[TimedAnswer], float]:
    """Sends all requests, which are sorted by time. Returns the answers in this order, and the client's CPU seconds.
    Raises RuntimeError for a wrong answer, or after ten minutes without data."""
    cpu = time.thread_time()
    streams = run_streams(url, sendings)
    cpu = time.thread_time() - cpu
    return [_answer(stream) for stream in streams], cpu


def run_streams(
    url: str, sendings: Sequence[Sending], on_data: Callable[[Stream], None] = lambda stream: None
) -> list[Stream]:
    """Sends all requests and receives until the last answer has ended. Calls `on_data` with each part of an answer."""
    address, started = urlsplit(url), time.perf_counter()
    streams: list[Stream] = []
    with selectors.DefaultSelector() as selector:
        while len(streams) < len(sendings) or selector.get_map():
            now = time.perf_counter() - started
            while len(streams) < len(sendings) and sendings[len(streams)].moment <= now:
                streams.append(_open(str(address.hostname), int(address.port or 80), sendings[len(streams)], now))
                selector.register(streams[-1].connection, selectors.EVENT_WRITE, streams[-1])
            has_more = len(streams) < len(sendings)
            timeout = max(0.0, sendings[len(streams)].moment - now) if has_more else _TIMEOUT_SECONDS
            ready = selector.select(timeout)
            if not ready and not has_more:
                raise RuntimeError(f"{len(selector.get_map())} requests have no answer after {_TIMEOUT_SECONDS} s")
            for key, _ in ready:
                if _go_on(selector, key.data, started):
                    on_data(key.data)
    return streams


def _open(host: str, port: int, sending: Sending, now: float) -> Stream:
    connection = socket.create_connection((host, port))
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Stream(connection, sending, now, memoryview(request_bytes(f"{host}:{port}", sending.body)))


def _go_on(selector: selectors.BaseSelector, stream: Stream, started: float) -> bool:
    """Sends or receives, whichever the connection is ready for. Returns whether it has received a part of the
    answer."""
    if stream.unsent:
        stream.unsent = stream.unsent[stream.connection.send(stream.unsent) :]
        if not stream.unsent:
            selector.modify(stream.connection, selectors.EVENT_READ, stream)
        return False
    data = stream.connection.recv(_RECEIVE_BYTES)
    if data:
        stream.received.append((time.perf_counter() - started, data))
        return True
    selector.unregister(stream.connection)
    stream.connection.close()
    return False


def _answer(stream: Stream) -> TimedAnswer:
    moments: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    for moment, events in events_of(stream.received):
        for event in events:
            usage, timings = event.get("usage") or usage, event.get("stage_timings") or timings
        if text_of(events):
            moments.append(moment)
    if usage.get("completion_tokens") != stream.sending.num_tokens or not moments:
        raise RuntimeError(f"an answer of {len(moments)} pieces of text ended with {usage}, not with {stream.sending}")
    return TimedAnswer(
        sent=stream.sent,
        first=moments[0],
        last=moments[-1],
        num_tokens=stream.sending.num_tokens,
        num_pieces=len(moments),
        num_bytes=sum(len(data) for _, data in stream.received),
        prompt_tokens=usage["prompt_tokens"],
        timings=timings,
    )
