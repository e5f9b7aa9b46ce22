"""A client of `/v1/chat/completions` on one thread. It sends each request at its time, whether or not earlier ones are
answered.

It records received data with time stamps, and parses all of it after the last answer has ended. So it uses little of
the CPU that it shares with the server, and reports its own use."""

import itertools
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

_RECEIVE_BYTES = 2**16
_TIMEOUT_SECONDS = 600.0

Content = list[dict[str, Any]]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sending:
    """A request for exactly `num_tokens` tokens, to be sent `moment` seconds after the start."""

    moment: float
    body: bytes
    num_tokens: int

    @classmethod
    def of(cls, moment: float, model: str, content: Content, num_tokens: int, **fields: Any) -> "Sending":
        """Returns a request for a greedy answer. `fields`: further fields of the request."""
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"stream_options": {"include_usage": True}, "max_tokens": num_tokens}
        body |= {"temperature": 0.0, "ignore_eos": True} | fields
        return cls(moment, json.dumps(body).encode(), num_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """`sent` and `times`: seconds from the load's start until the request was sent and until each piece of text
    arrived. `num_bytes`: received, including headers. `timings`: the server's own, if the request has
    `stage_timings`."""

    sent: float
    times: list[float]
    num_tokens: int
    num_bytes: int
    prompt_tokens: int
    timings: dict[str, Any]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens; a piece may have several. Raises ZeroDivisionError for an answer of one
        token."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


@dataclass(slots=True)
class Stream:
    """An open request. `received`: each part of its answer, with the seconds since the load's start."""

    connection: socket.socket
    sending: Sending
    sent: float
    unsent: memoryview
    received: list[tuple[float, bytes]] = field(default_factory=list)


def send_all(url: str, sendings: Sequence[Sending]) -> tuple[list[Answer], float]:
    """Sends all requests, which are sorted by time. Returns the answers in this order, and the client's CPU seconds.
    Raises RuntimeError for a wrong answer, or after ten minutes without data."""
    cpu = time.thread_time()
    streams = run_streams(url, sendings)
    cpu = time.thread_time() - cpu
    return [_answer(stream) for stream in streams], cpu


def ask(url: str, model: str, content: Content, num_tokens: int, **fields: Any) -> Answer:
    """Sends one request, and waits for its answer. See `Sending.of` and `send_all`."""
    (answer,), _ = send_all(url, [Sending.of(0.0, model, content, num_tokens, **fields)])
    return answer


def ask_all(
    url: str, model: str, contents: Sequence[Content], num_tokens: int, *, concurrency: int
) -> tuple[list[Answer], float]:
    """Sends `concurrency` requests at a time. Returns the answers, and the seconds until the last one ended."""
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda content: ask(url, model, content, num_tokens), contents))
    return answers, time.perf_counter() - started


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
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(sending.body)}\r\nConnection: close\r\n\r\n"
    return Stream(connection, sending, now, memoryview(head.encode() + sending.body))


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


def _answer(stream: Stream) -> Answer:
    times: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    for moment, events in events_of(stream.received):
        for event in events:
            usage, timings = event.get("usage") or usage, event.get("stage_timings") or timings
        if text_of(events):
            times.append(moment)
    if usage.get("completion_tokens") != stream.sending.num_tokens or not times:
        raise RuntimeError(f"an answer of {len(times)} pieces of text ended with {usage}, not with {stream.sending}")
    num_bytes = sum(len(data) for _, data in stream.received)
    return Answer(stream.sent, times, stream.sending.num_tokens, num_bytes, usage["prompt_tokens"], timings)


def events_of(received: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, list[Event]]]:
    """Yields each time of reception with the events completed then. Raises RuntimeError unless the status is 200."""
    parser, rest = h11.Connection(h11.CLIENT), b""
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "server")]))
    parser.send(h11.EndOfMessage())
    for moment, data in received:
        parser.receive_data(data)
        *lines, rest = (rest + _body(parser)).split(b"\n")
        yield moment, [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


def text_of(events: Sequence[Event]) -> str:
    """Returns the events' text, of all answers."""
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def _body(parser: h11.Connection) -> bytes:
    """Returns the newly received part of the body."""
    body = b""
    while True:
        event: Any = parser.next_event()
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise RuntimeError(f"the server answers {event.status_code}")
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        elif not isinstance(event, h11.Response):
            return body
