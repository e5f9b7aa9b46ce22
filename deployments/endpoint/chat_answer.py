"""Turns the pieces of a chat completion's answers into one body or into chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raylens.deployments.api import chat
from raylens.deployments.api.messages import thought_form
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.answer import ChunkedAnswer, finite
from raylens.deployments.endpoint.tool_calls import AnswerText
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.reader import CallPart


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    parts: AnswerText
    custom: frozenset[str]
    thought: str = ""
    text: str = ""
    calls: list[chat.AnswerCall | chat.AnswerCustomCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[chat.ChatTokenLogprob] = field(default_factory=list)
    has_begun: bool = False

    def add(self, piece: GeneratedText) -> tuple[str, list[CallPart]]:
        """Returns the text and the parts of tool calls that the piece makes certain."""
        text, parts = self.parts.add(piece)
        self.thought += piece.thought
        self.text += text
        for part in parts:
            self._add_call(part)
        return text, parts

    def _add_call(self, part: CallPart) -> None:
        if part.id is not None and part.name in self.custom:
            self.calls.append(chat.AnswerCustomCall(part.id, chat.AnswerInput(part.name)))
        elif part.id is not None and part.name is not None:
            self.calls.append(chat.AnswerCall(part.id, chat.AnswerFunction(part.name)))
        call = self.calls[-1]
        if isinstance(call, chat.AnswerCustomCall):
            call.custom.input += part.arguments
        else:
            call.function.arguments += part.arguments

    def delta(self, part: CallPart) -> chat.ToolCallDelta:
        """Returns a part of one of the `calls` in a chunk's form."""
        call = self.calls[part.index]
        head: dict[str, Any] = {"index": part.index, "id": part.id, "type": part.id and call.type}
        if isinstance(call, chat.AnswerCustomCall):
            return chat.ToolCallDelta(**head, custom=chat.InputDelta(name=part.name, input=part.arguments))
        return chat.ToolCallDelta(**head, function=chat.FunctionDelta(name=part.name, arguments=part.arguments))

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.calls and reason == "stop" else reason


class ChatAnswer(ChunkedAnswer[chat.ChatCompletionChunk]):
    """`tool_calls`: the form of tool calls in the text, or None if there can be none."""

    def __init__(
        self, body: chat.ChatCompletionRequest, account: RequestAccount, tool_calls: ToolCallFormat | None
    ) -> None:
        super().__init__(body, account, chat.ChatCompletionChunk)
        self._has_logprobs = body.logprobs
        self._has_token_ids = body.return_token_ids
        self._has_thoughts = body.include_reasoning is not False
        self._scored_prompt: Sequence[ScoredToken] = ()
        self._choices = [
            _Choice(AnswerText(tool_calls, body.offered), body.offered.custom) for _ in range(account.num_answers)
        ]

    def add(self, pieces: Sequence[GeneratedText]) -> None:
        for piece in pieces:
            choice = self._choices[piece.index]
            choice.add(piece)
            choice.token_ids += piece.token_ids
            choice.logprobs += map(self._logprob, piece.logprobs)
            if piece.prompt_logprobs:
                self._scored_prompt = piece.prompt_logprobs

    def whole(self) -> chat.ChatCompletion:
        return chat.ChatCompletion(
            **self._head,
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
            usage=self._account.usage,
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=self._prompt_logprobs(self._scored_prompt),
            stage_timings=self._timings(),
        )

    def _choice(self, index: int, choice: _Choice) -> chat.Choice:
        content = None if choice.calls and not choice.text else choice.text
        thought = choice.thought if self._has_thoughts else None
        return chat.Choice(
            index=index,
            message=chat.AssistantMessage(content=content, tool_calls=choice.calls or None, **thought_form(thought)),
            logprobs=chat.ChoiceLogprobs(content=choice.logprobs) if self._has_logprobs else None,
            finish_reason=choice.finish_reason(self._account.finish_reason(index)),
            token_ids=choice.token_ids if self._has_token_ids else None,
        )

    def _chunks_of(self, piece: GeneratedText) -> Iterator[chat.ChatCompletionChunk]:
        """Yields the role before the first piece, the piece's text and tool calls, and the finish reason."""
        choice, index = self._choices[piece.index], piece.index
        if not choice.has_begun:
            choice.has_begun = True
            opening = chat.ChunkChoice(index=index, delta=chat.Delta(role="assistant", content=""))
            yield self._chunk([opening], usage=self._usage(piece, 0), prompt_token_ids=self._prompt_token_ids())
        usage = self._usage(piece, piece.num_output_tokens)
        text, parts = choice.add(piece)
        thought = piece.thought if self._has_thoughts else ""
        token_ids = piece.token_ids if self._has_token_ids else None
        logprobs = (
            chat.ChoiceLogprobs(content=[self._logprob(token) for token in piece.logprobs]) if piece.logprobs else None
        )
        if text or thought or parts or token_ids or logprobs:
            content = text if text or not (parts or thought) else None
            deltas = [*map(choice.delta, parts)]
            delta = chat.Delta(content=content, tool_calls=deltas or None, **thought_form(thought))
            told = chat.ChunkChoice(index=index, delta=delta, token_ids=token_ids, logprobs=logprobs)
            yield self._chunk([told], usage=usage)
        if piece.finish_reason is not None:
            reason = choice.finish_reason(piece.finish_reason)
            end = chat.ChunkChoice(index=index, delta=chat.Delta(), finish_reason=reason)
            yield self._chunk([end], usage=usage, stage_timings=self._timings())

    def _prompt_token_ids(self) -> list[int] | None:
        return self._account.requests[0].trace.prompt_token_ids if self._has_token_ids else None

    def _logprob(self, token: ScoredToken) -> chat.ChatTokenLogprob:
        assert token.logprob is not None, "only the first token of a prompt has none"
        name = self._token_name
        top = [chat.TokenLogprob(name(number, text), finite(value), list(text)) for number, text, value in token.top]
        own = name(token.token_id, token.content)
        return chat.ChatTokenLogprob(own, finite(token.logprob), list(token.content), top)
