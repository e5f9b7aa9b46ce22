"""Raw requests for streams, and a parser of their answers, for clients that parse only after the last answer has
ended."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import h11

Event = dict[str, Any]


def request_bytes(address: str, body: bytes) -> bytes:
    """Returns a complete request for a chat completion. `address`: host and port of the server."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


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
