"""The interface of all kinds of answers: each turns the pipeline's pieces into a body or into server-sent events."""

from collections.abc import AsyncIterator
from typing import Protocol

from pydantic import BaseModel

from deployments.api.wire import ErrorResponse
from deployments.stages.stage_messages import GeneratedText

Pieces = AsyncIterator[GeneratedText]
"""The answers to a client's request, as they are generated."""


class Answer(Protocol):
    """Shapes what one request gets as its client asked for it. Pieces have been accounted for."""

    async def complete(self, pieces: Pieces) -> BaseModel:
        """The whole answer at once."""

    def events(self, pieces: Pieces) -> AsyncIterator[str]:
        """The answer as a stream of server-sent events, up to the last about it."""

    def error_event(self, error: ErrorResponse) -> str:
        """What a stream says that cannot go on."""

    @property
    def last_event(self) -> str:
        """What ends a stream, failed or not."""


class Chunks:
    """How streams of chunks end, of chat completions and of completions alike."""

    last_event = "data: [DONE]\n\n"

    def error_event(self, error: ErrorResponse) -> str:
        return f"data: {error.model_dump_json()}\n\n"


def sent_event(data: BaseModel, name: str | None = None) -> str:
    """A server-sent event; see https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data.model_dump_json()}\n\n"
