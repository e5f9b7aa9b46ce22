"""The pieces of one answer as wire objects: a whole completion, or server-sent events."""

import time
from collections.abc import AsyncIterator

from deployments.accounting import RequestAccount
from deployments.media_items import PipelineRequest
from deployments.protocol import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Delta,
)
from deployments.stage_calls import StageFailedError
from deployments.stage_messages import GeneratedText


class Answer:
    """Shapes one answer as the client asked for it and accounts for it on the way."""

    def __init__(self, body: ChatCompletionRequest, request: PipelineRequest, account: RequestAccount) -> None:
        self._body = body
        self._request = request
        self._account = account
        self._created = int(time.time())

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def complete(self, first: GeneratedText, pieces: AsyncIterator[GeneratedText]) -> ChatCompletion:
        """The whole answer at once. Raises StageFailedError when the engine fails on it."""
        text, token_ids = "", []
        async for piece in self._accounted(first, pieces):
            text += piece.text
            token_ids += piece.token_ids
        self._account.finish(self._request)
        choice = Choice(message=AssistantMessage(content=text), finish_reason=self._account.finish_reason)
        completion = ChatCompletion(
            id=self.request_id,
            created=self._created,
            model=self._body.model,
            choices=[choice],
            usage=self._account.usage,
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._request.prompt_token_ids
            choice.token_ids = token_ids
        if self._body.stage_timings:
            completion.stage_timings = self._account.timings(self._request)
        return completion

    async def chunks(
        self, first: GeneratedText, pieces: AsyncIterator[GeneratedText]
    ) -> AsyncIterator[ChatCompletionChunk]:
        """The answer as a stream: the role, each piece of text, the finish reason, and the usage if asked for."""
        opening = self._chunk(Delta(role="assistant", content=""))
        if self._body.return_token_ids:
            opening.prompt_token_ids = self._request.prompt_token_ids
        yield opening
        async for piece in self._accounted(first, pieces):
            token_ids = piece.token_ids if self._body.return_token_ids else None
            if piece.text or token_ids:
                yield self._chunk(Delta(content=piece.text), token_ids=token_ids)
        final = self._chunk(Delta(), finish_reason=self._account.finish_reason)
        if self._body.stage_timings:
            final.stage_timings = self._account.timings(self._request)
        yield final
        if self._body.stream_options and self._body.stream_options.include_usage:
            usage = self._chunk(Delta())
            usage.choices, usage.usage = [], self._account.usage
            yield usage
        self._account.finish(self._request)

    async def _accounted(
        self, first: GeneratedText, pieces: AsyncIterator[GeneratedText]
    ) -> AsyncIterator[GeneratedText]:
        yield self._checked(first)
        async for piece in pieces:
            yield self._checked(piece)

    def _checked(self, piece: GeneratedText) -> GeneratedText:
        self._account.add(piece)
        if piece.finish_reason not in (None, "stop", "length"):
            raise StageFailedError("generate", f"the engine ended the request with {piece.finish_reason!r}")
        return piece

    def _chunk(
        self, delta: Delta, *, finish_reason: str | None = None, token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.request_id,
            created=self._created,
            model=self._body.model,
            choices=[ChunkChoice(delta=delta, finish_reason=finish_reason, token_ids=token_ids)],
        )
