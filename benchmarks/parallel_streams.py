"""A client of many streams on one thread. It reads answers only after the last one has ended, so that while they come
it takes next to nothing of the processor that it shares with the servers it measures."""

import itertools
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from benchmarks.event_stream import events_of, request_bytes, text_of
from benchmarks.streaming_client import Content, chat_body

MarkT = TypeVar("MarkT")

_RECEIVE_BYTES = 2**16
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ParallelAnswers(Generic[MarkT]):
    """What came while all streams ran: from `begin`, when the last one had its first text, to `end`, when the first one
    had its last. `seconds`: that time. `gaps`: seconds between pieces of text of the same stream; what is received at
    once is one piece. `num_tokens`: the tokens of that time, of all streams, by their share of the text."""

    begin: MarkT
    end: MarkT
    seconds: float
    gaps: list[float]
    num_pieces: int
    num_tokens: float


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    received: list[tuple[float, bytes]] = field(default_factory=list)
    has_begun: bool = False
    has_ended: bool = False


def stream_together(
    url: str, model: str, contents: Sequence[Content], num_tokens: int, at_mark: Callable[[], MarkT]
) -> ParallelAnswers[MarkT]:
    """Streams greedy answers of exactly `num_tokens` tokens, all at once. Calls `at_mark` at the beginning and at the
    end of the time in which all of them run. Raises RuntimeError if there is no such time, or an answer is of another
    kind."""
    streams = [_begin(url, model, content, num_tokens) for content in contents]
    marks = _receive_all(streams, at_mark)
    (begin_time, begin), (end_time, end) = marks
    if begin_time >= end_time:
        raise RuntimeError(f"of {len(streams)} streams, the first ended before the last began: ask for more tokens")
    gaps, num_pieces, tokens = list[float](), 0, 0.0
    for stream in streams:
        pieces = list(_pieces(stream, num_tokens))
        within = [(moment, length) for moment, length in pieces if begin_time <= moment <= end_time]
        gaps += [after[0] - before[0] for before, after in itertools.pairwise(within)]
        num_pieces += len(within)
        tokens += num_tokens * sum(length for _, length in within) / sum(length for _, length in pieces)
    return ParallelAnswers(begin, end, end_time - begin_time, gaps, num_pieces, tokens)


def _begin(url: str, model: str, content: Content, num_tokens: int) -> _Stream:
    address = urlsplit(url)
    body = json.dumps(chat_body(model, content, num_tokens)).encode()
    connection = socket.create_connection((address.hostname, address.port), timeout=_TIMEOUT_SECONDS)
    connection.sendall(request_bytes(address.netloc, body))
    return _Stream(connection)


def _receive_all(streams: Sequence[_Stream], at_mark: Callable[[], MarkT]) -> list[tuple[float, MarkT]]:
    """Receives until all have ended. Returns both marks and their times."""
    marks = []
    num_waiting = len(streams)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                stream = key.data
                data = stream.connection.recv(_RECEIVE_BYTES)
                now = time.perf_counter()
                if not data:
                    selector.unregister(stream.connection)
                    stream.connection.close()
                    continue
                stream.received.append((now, data))
                if not stream.has_begun and b"data: {" in data:
                    stream.has_begun = True
                    num_waiting -= 1
                    if num_waiting == 0:
                        marks.append((now, at_mark()))
                if not stream.has_ended and b'"finish_reason":"' in data:
                    stream.has_ended = True
                    if not any(other.has_ended for other in streams if other is not stream):
                        marks.append((now, at_mark()))
    if len(marks) != 2:
        raise RuntimeError(f"no answers of both marks, but {streams[0].received[-1:]}")
    return marks


def _pieces(stream: _Stream, num_tokens: int) -> Iterator[tuple[float, int]]:
    """Yields the time of each piece of text and its length in characters."""
    usage = None
    for moment, events in events_of(stream.received):
        length = len(text_of(events))
        usage = next((event["usage"] for event in events if event.get("usage")), usage)
        if length:
            yield moment, length
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"a stream ended with {usage}, not with {num_tokens} tokens")
