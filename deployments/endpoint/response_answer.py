"""Turns an answer's pieces into the form of the Responses API: messages, with tool calls between them.

The events and their order: https://platform.openai.com/docs/api-reference/responses-streaming."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Literal

from raylens.deployments.api import responses
from raylens.deployments.api.tools import HostedTool
from raylens.deployments.api.wire import ErrorResponse
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.answer import sent_event
from raylens.deployments.endpoint.tool_calls import AnswerText
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.reader import CallPart

_TOLD_AGAIN = {"instructions", "metadata", "temperature", "top_p", "max_output_tokens", "previous_response_id"}
"""Fields of the request that the answer repeats."""


class ResponseAnswer:
    """`tool_calls`: the form of tool calls in the text, or None if there can be none. `is_stored`: later requests can
    go on from it."""

    last_event = ""
    """`last_events` or `error_event` already ends the stream."""

    def __init__(
        self,
        body: responses.ResponsesRequest,
        account: RequestAccount,
        tool_calls: ToolCallFormat | None,
        *,
        is_stored: bool = False,
    ) -> None:
        self._body = body
        self._account = account
        self._parts = AnswerText(tool_calls, body.offered)
        self._is_stored = is_stored
        self._output: list[responses.OutputItem] = []
        self._numbers = count()

    def add(self, pieces: Sequence[GeneratedText]) -> None:
        self.events(pieces)

    def whole(self) -> responses.ResponseObject:
        self._end_output()
        return self.finished

    def first_events(self) -> str:
        kinds = ("response.created", "response.in_progress")
        begun = [self._event(kind, response=self._response("in_progress")) for kind in kinds]
        return "".join(begun)

    def events(self, pieces: Sequence[GeneratedText]) -> str:
        return "".join(event for piece in pieces for event in self._told(piece.thought, *self._parts.add(piece)))

    def last_events(self) -> str:
        events, finished = self._end_output(), self.finished
        return events + self._event(f"response.{finished.status}", response=finished)

    def _end_output(self) -> str:
        events = list(self._close_thoughts(self._status))
        if not self._output:
            events += self._open_message()
        return "".join([*events, *self._close_message(self._status), *self._close_call(self._status)])

    def error_event(self, error: ErrorResponse) -> str:
        return self._event("response.failed", response=self.failed(error))

    def begun(self, status: responses.ResponseStatus) -> responses.ResponseObject:
        """The response before its first piece."""
        return self._response(status)

    def failed(self, error: ErrorResponse) -> responses.ResponseObject:
        failed = self._response("failed")
        failed.error = responses.ResponseError(code=error.error.code or "server_error", message=error.error.message)
        return failed

    def _told(self, thought: str, text: str, parts: list[CallPart]) -> Iterator[str]:
        """Yields the events of the thoughts, of the text behind them and of the calls after it."""
        if thought:
            yield from self._think(thought)
        if text or parts:
            yield from self._close_thoughts("completed")
        if text:
            if self._message is None:
                yield from self._close_call("completed")
                yield from self._open_message()
            message = self._message
            assert message is not None
            message.content[0].text += text
            yield self._event("response.output_text.delta", delta=text, logprobs=[], **self._at(message))
        for part in parts:
            yield from self._close_message("completed")
            yield from self._call(part)

    @property
    def _message(self) -> responses.OutputMessage | None:
        """The open message, to which text is appended, or None."""
        last = self._output[-1] if self._output else None
        return last if isinstance(last, responses.OutputMessage) and last.status == "in_progress" else None

    def _think(self, thought: str) -> Iterator[str]:
        if not self._output:
            item_id = self._account.request_id.replace("resp_", "rs_", 1)
            begun = responses.OutputReasoning(id=item_id, content=[], status="in_progress")
            yield self._event("response.output_item.added", output_index=0, item=begun)
            part = responses.ReasoningText(text="")
            self._output.append(begun.model_copy(update={"content": [part]}))
            yield self._event("response.content_part.added", part=part, **self._at(self._output[0]))
        reasoning = self._output[0]
        assert isinstance(reasoning, responses.OutputReasoning), "thoughts come before all else"
        reasoning.content[0].text += thought
        yield self._event("response.reasoning_text.delta", delta=thought, **self._at(reasoning))

    def _close_thoughts(self, status: Literal["completed", "incomplete"]) -> Iterator[str]:
        last = self._output[-1] if self._output else None
        if not isinstance(last, responses.OutputReasoning) or last.status != "in_progress":
            return
        (part,) = last.content
        yield self._event("response.reasoning_text.done", text=part.text, **self._at(last))
        yield self._event("response.content_part.done", part=part, **self._at(last))
        last.status = status
        yield self._event("response.output_item.done", output_index=0, item=last)

    def _open_message(self) -> Iterator[str]:
        number = len(self._output)
        item_id = self._account.request_id.replace("resp_", "msg_", 1) + (f"_{number}" if number else "")
        begun = responses.OutputMessage(id=item_id, status="in_progress", content=[])
        yield self._event("response.output_item.added", output_index=number, item=begun)
        message = responses.OutputMessage(id=item_id, status="in_progress", content=[responses.OutputText(text="")])
        self._output.append(message)
        yield self._event("response.content_part.added", part=responses.OutputText(text=""), **self._at(message))

    def _close_message(self, status: Literal["completed", "incomplete"]) -> Iterator[str]:
        if (message := self._message) is None:
            return
        (part,) = message.content
        yield self._event("response.output_text.done", text=part.text, logprobs=[], **self._at(message))
        yield self._event("response.content_part.done", part=part, **self._at(message))
        message.status = status
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=message)

    def _at(self, item: responses.OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._output) - 1, "content_index": 0}

    def _call(self, part: CallPart) -> Iterator[str]:
        """Yields the events of the next part of a tool call."""
        if part.id is not None and part.name is not None:
            yield from self._close_call("completed")
            begun = self._begun_call(part.id, part.name)
            yield self._event("response.output_item.added", output_index=len(self._output), item=begun)
            self._output.append(begun.model_copy())
        call = self._output[-1]
        if isinstance(call, responses.OutputCustomCall):
            call.input += part.arguments
            kind = "response.custom_tool_call_input.delta"
        else:
            assert isinstance(call, responses.OutputCall), "a call's first part opens it"
            call.arguments += part.arguments
            kind = "response.function_call_arguments.delta"
        if part.arguments:
            yield self._event(kind, item_id=call.id, output_index=len(self._output) - 1, delta=part.arguments)

    def _begun_call(self, call_id: str, name: str) -> responses.OutputCall | responses.OutputCustomCall:
        own_id = call_id.removeprefix("call_")
        if name in self._body.offered.custom:
            return responses.OutputCustomCall(
                id=f"ctc_{own_id}", call_id=call_id, name=name, input="", status="in_progress"
            )
        return responses.OutputCall(id=f"fc_{own_id}", call_id=call_id, name=name, arguments="", status="in_progress")

    def _close_call(self, status: Literal["completed", "incomplete"]) -> Iterator[str]:
        call = self._output[-1] if self._output else None
        if not isinstance(call, responses.OutputCall | responses.OutputCustomCall) or call.status != "in_progress":
            return
        at: dict[str, Any] = {"item_id": call.id, "output_index": len(self._output) - 1}
        if isinstance(call, responses.OutputCustomCall):
            yield self._event("response.custom_tool_call_input.done", input=call.input, **at)
        else:
            told = {"name": call.name, "arguments": call.arguments}
            yield self._event("response.function_call_arguments.done", **told, **at)
        call.status = status
        yield self._event("response.output_item.done", output_index=at["output_index"], item=call)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "completed" if self._account.finish_reason(0) == "stop" else "incomplete"

    @cached_property
    def finished(self) -> responses.ResponseObject:
        """The response, once its last piece has been added."""
        response = self._response(self._status)
        response.output = self._output
        if response.status == "incomplete":
            response.incomplete_details = responses.IncompleteDetails(reason="max_output_tokens")
        usage = self._account.usage
        response.usage = responses.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=responses.InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=responses.OutputTokensDetails(
                reasoning_tokens=0
                if usage.completion_tokens_details is None
                else usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )
        if self._body.stage_timings:
            response.stage_timings = self._account.timings()
        return response

    def _response(self, status: responses.ResponseStatus) -> responses.ResponseObject:
        body, choice = self._body, self._body.tool_choice
        return responses.ResponseObject(
            id=self._account.request_id,
            model=self._account.model,
            created_at=self._account.created,
            status=status,
            output=[],
            **body.model_dump(include=_TOLD_AGAIN),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            store=self._is_stored,
            background=body.background,
            tool_choice=choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
            tools=[
                ({"strict": None} if tool.type == "function" else {}) | tool.model_dump(exclude_none=True)
                for tool in body.tools or ()
                if not isinstance(tool, HostedTool)
            ],
        )

    def _event(self, kind: str, **fields: Any) -> str:
        event = responses.ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)
        return sent_event(event, name=kind)
