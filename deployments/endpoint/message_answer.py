"""Turns an answer's pieces into a message of Anthropic's API: blocks of thoughts, text and tool calls.

The events and their order: https://docs.claude.com/en/docs/build-with-claude/streaming"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from raylens.deployments.api import anthropic
from raylens.deployments.api.wire import ErrorResponse
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.answer import sent_event
from raylens.deployments.endpoint.errors import anthropic_error
from raylens.deployments.endpoint.tool_calls import AnswerText
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.reader import CallPart


class MessageAnswer:
    """`tool_calls`: the form of tool calls in the text, or None if there can be none."""

    last_event = ""
    """`last_events` or `error_event` already ends the stream."""

    def __init__(
        self, body: anthropic.MessagesRequest, account: RequestAccount, tool_calls: ToolCallFormat | None
    ) -> None:
        self._body = body
        self._account = account
        self._parts = AnswerText(tool_calls, body.offered)
        self._blocks: list[anthropic.AnswerBlock] = []
        self._arguments = ""
        """The JSON of the open tool call so far."""
        self._is_open = False
        self._stop: str | None = None

    def add(self, pieces: Sequence[GeneratedText]) -> None:
        self.events(pieces)

    def whole(self) -> anthropic.AnswerMessage:
        self._close()
        timings = self._account.timings() if self._body.stage_timings else None
        return self._message(content=self._blocks, **dict(self._end), stage_timings=timings)

    def first_events(self) -> str:
        return self._event("message_start", message=self._message(content=[]))

    def events(self, pieces: Sequence[GeneratedText]) -> str:
        return "".join(event for piece in pieces for event in self._told(piece))

    def last_events(self) -> str:
        events = self._close()
        return events + self._event("message_delta", delta=self._end, usage=self._usage) + self._event("message_stop")

    def error_event(self, error: ErrorResponse) -> str:
        return sent_event(anthropic_error(error, self._account.request_id), name="error")

    def _told(self, piece: GeneratedText) -> Iterator[str]:
        text, parts = self._parts.add(piece)
        if piece.stop in (self._body.stop or ()):
            self._stop = piece.stop
        if piece.thought:
            if not (self._is_open and isinstance(self._blocks[-1], anthropic.AnswerThinkingBlock)):
                yield self._open(anthropic.AnswerThinkingBlock(thinking=""))
            thoughts = self._blocks[-1]
            assert isinstance(thoughts, anthropic.AnswerThinkingBlock)
            thoughts.thinking += piece.thought
            yield self._delta(type="thinking_delta", thinking=piece.thought)
        if text:
            if not (self._is_open and isinstance(self._blocks[-1], anthropic.AnswerTextBlock)):
                yield self._open(anthropic.AnswerTextBlock(text=""))
            block = self._blocks[-1]
            assert isinstance(block, anthropic.AnswerTextBlock)
            block.text += text
            yield self._delta(type="text_delta", text=text)
        for part in parts:
            yield from self._call(part)

    def _call(self, part: CallPart) -> Iterator[str]:
        if part.id is not None and part.name is not None:
            yield self._open(anthropic.AnswerToolUseBlock(id=part.id, name=part.name, input={}))
        self._arguments += part.arguments
        if part.arguments:
            yield self._delta(type="input_json_delta", partial_json=part.arguments)

    def _open(self, block: anthropic.AnswerBlock) -> str:
        """Ends the open block, and begins the next one."""
        closed = self._close()
        self._is_open = True
        self._blocks.append(block.model_copy())
        return closed + self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> str:
        if not self._is_open:
            return ""
        self._is_open = False
        block, events = self._blocks[-1], ""
        if isinstance(block, anthropic.AnswerToolUseBlock):
            block.input, self._arguments = _object_in(self._arguments), ""
        if isinstance(block, anthropic.AnswerThinkingBlock):
            events = self._delta(type="signature_delta", signature="")
        return events + self._event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, **delta: str) -> str:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    @property
    def _end(self) -> anthropic.MessageDelta:
        if self._account.finish_reason(0) == "length":
            return anthropic.MessageDelta(stop_reason="max_tokens", stop_sequence=None)
        if any(isinstance(block, anthropic.AnswerToolUseBlock) for block in self._blocks):
            return anthropic.MessageDelta(stop_reason="tool_use", stop_sequence=None)
        reason: anthropic.StopReason = "end_turn" if self._stop is None else "stop_sequence"
        return anthropic.MessageDelta(stop_reason=reason, stop_sequence=self._stop)

    @property
    def _usage(self) -> anthropic.MessageUsage:
        usage = self._account.usage
        num_cached = usage.prompt_tokens_details.cached_tokens
        return anthropic.MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )

    def _message(self, **fields: Any) -> anthropic.AnswerMessage:
        account = self._account
        return anthropic.AnswerMessage(id=account.request_id, model=account.model, usage=self._usage, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        return sent_event(anthropic.MessageEvent(type=kind, **fields), name=kind)


def _object_in(arguments: str) -> dict[str, Any]:
    """Returns the call's arguments; of broken JSON what can be read of it."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}
