"""The interface of all kinds of answers: each turns the pipeline's pieces into a body or into server-sent events."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from pydantic import BaseModel

from raylens.deployments.api.wire import ErrorResponse
from raylens.deployments.wire.stage_messages import GeneratedText

Pieces = AsyncIterator[Sequence[GeneratedText]]
"""The answers to a client's request, as they are generated. Pieces that are ready together come together."""


class Answer(Protocol):
    """Formats the pieces of one request's answers for the client's API. The account has already counted the pieces."""

    async def complete(self, pieces: Pieces) -> BaseModel:
        """Returns the whole answer at once."""

    def events(self, pieces: Pieces) -> AsyncIterator[str]:
        """Yields the answer as server-sent events, except the last event. Events that are ready together come as one
        text: sending a text costs as much as formatting it."""

    def error_event(self, error: ErrorResponse) -> str:
        """Returns the event for an error in mid-stream."""

    @property
    def last_event(self) -> str:
        """The final event of every stream, failed or not."""


class Chunks:
    """The end of a stream of chunks, for chat completions and completions alike."""

    last_event = "data: [DONE]\n\n"

    def error_event(self, error: ErrorResponse) -> str:
        return f"data: {error.model_dump_json()}\n\n"


def sent_event(data: BaseModel, name: str | None = None) -> str:
    """Returns a server-sent event; see https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data.model_dump_json()}\n\n"
