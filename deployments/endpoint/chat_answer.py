"""Turns the pieces of a chat completion's answers into one body or into chunks."""

from collections.abc import AsyncIterator, Sequence

from raylens.deployments.api.chat import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatTokenLogprob,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    ToolCallDelta,
)
from raylens.deployments.api.tools import ToolCall
from raylens.deployments.endpoint.accounting import RequestAccount, usage_so_far
from raylens.deployments.endpoint.answer import Chunks, Pieces, sent_event
from raylens.deployments.endpoint.tool_calls import AnswerText
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken
from raylens.preprocess.schema import ToolCallFormat

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


class _Choice:
    """One answer so far."""

    def __init__(self, parts: AnswerText) -> None:
        self._parts = parts
        self.text = ""
        self.calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.logprobs: list[ChatTokenLogprob] = []
        self.has_begun = False

    def add(self, piece: GeneratedText) -> tuple[str, list[ToolCall]]:
        """Returns the text and the tool calls that the piece makes certain."""
        text, calls = self._parts.add(piece)
        self.text += text
        self.calls += calls
        return text, calls

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.calls and reason == "stop" else reason


class ChatAnswer(Chunks):
    """See `Answer`. `tool_calls`: the form of tool calls in the text, or None if there can be none."""

    def __init__(self, body: ChatCompletionRequest, account: RequestAccount, tool_calls: ToolCallFormat | None) -> None:
        self._body = body
        self._account = account
        self._choices = [_Choice(AnswerText(tool_calls, body.offered)) for _ in range(account.num_answers)]

    async def complete(self, pieces: Pieces) -> ChatCompletion:
        async for ready in pieces:
            for piece in ready:
                choice = self._choices[piece.index]
                choice.add(piece)
                choice.token_ids += piece.token_ids
                choice.logprobs += map(_logprob, piece.logprobs)
        completion = ChatCompletion(
            id=self._account.request_id,
            created=self._account.created,
            model=self._body.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
            usage=self._account.usage,
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._account.requests[0].trace.prompt_token_ids
        if self._body.stage_timings:
            completion.stage_timings = self._account.timings()
        return completion

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        """Yields the role of each answer, its pieces of text, its finish reason, and the usage if the client asked for
        it."""
        async for ready in pieces:
            if events := "".join(self._event(piece, chunk) for piece in ready for chunk in self._chunks_of(piece)):
                yield events
        if self._body.includes_usage:
            usage = self._chunk([])
            usage.usage = self._account.usage
            yield sent_event(usage)

    def _event(self, piece: GeneratedText, chunk: ChatCompletionChunk) -> str:
        if self._body.tells_usage_always:
            is_opening = chunk.choices[0].delta.role is not None
            chunk.usage = usage_so_far(piece, 0 if is_opening else piece.num_output_tokens)
        return sent_event(chunk)

    def _choice(self, index: int, choice: _Choice) -> Choice:
        message = AssistantMessage(content=choice.text, tool_calls=choice.calls or None)
        if choice.calls and not choice.text:
            message.content = None
        return Choice(
            index=index,
            message=message,
            logprobs=ChoiceLogprobs(content=choice.logprobs) if self._body.logprobs else None,
            finish_reason=choice.finish_reason(self._account.finish_reason(index)),
            token_ids=choice.token_ids if self._body.return_token_ids else None,
        )

    def _chunks_of(self, piece: GeneratedText) -> list[ChatCompletionChunk]:
        choice, index = self._choices[piece.index], piece.index
        chunks = []
        if not choice.has_begun:
            choice.has_begun = True
            opening = self._chunk([ChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
            if self._body.return_token_ids:
                opening.prompt_token_ids = self._account.requests[0].trace.prompt_token_ids
            chunks.append(opening)
        num_calls = len(choice.calls)
        text, calls = choice.add(piece)
        token_ids = piece.token_ids if self._body.return_token_ids else None
        logprobs = ChoiceLogprobs(content=[_logprob(token) for token in piece.logprobs]) if piece.logprobs else None
        if text or calls or token_ids or logprobs:
            deltas = [
                ToolCallDelta(index=number, **call.model_dump()) for number, call in enumerate(calls, start=num_calls)
            ]
            delta = Delta(content=text if text or not calls else None, tool_calls=deltas or None)
            chunks.append(self._chunk([ChunkChoice(index=index, delta=delta, token_ids=token_ids, logprobs=logprobs)]))
        if piece.finish_reason is not None:
            reason = choice.finish_reason(piece.finish_reason)
            final = self._chunk([ChunkChoice(index=index, delta=Delta(), finish_reason=reason)])
            if self._body.stage_timings:
                final.stage_timings = self._account.timings()
            chunks.append(final)
        return chunks

    def _chunk(self, choices: Sequence[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._account.request_id,
            created=self._account.created,
            model=self._body.model,
            choices=list(choices),
        )


def token_text(content: bytes) -> str:
    """Returns a token's bytes as text. Incomplete characters become replacement characters."""
    return content.decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _logprob(token: ScoredToken) -> ChatTokenLogprob:
    assert token.logprob is not None, "only the first token of a prompt has none"
    return ChatTokenLogprob(
        token=token_text(token.content),
        logprob=finite(token.logprob),
        bytes=list(token.content),
        top_logprobs=[
            TokenLogprob(token=token_text(content), logprob=finite(logprob), bytes=list(content))
            for content, logprob in token.top
        ],
    )
