"""An answer of the Responses API out of the pieces of the one text that it holds.

The events and their order: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal

from deployments.accounting import RequestAccount
from deployments.answer import Pieces, sent_event
from deployments.api.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from deployments.api.wire import ErrorResponse


class ResponseAnswer:
    """See `deployments.answer.Answer`."""

    def __init__(self, body: ResponsesRequest, account: RequestAccount) -> None:
        self._body = body
        self._account = account
        self._item_id = account.request_id.replace("resp_", "msg_", 1)
        self._text = ""
        self._num_events = 0

    async def complete(self, pieces: Pieces) -> ResponseObject:
        async for piece in pieces:
            self._text += piece.text
        return self._finished()

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        at: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        begun = self._message("in_progress")
        begun.content = []
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._event("response.content_part.added", part=OutputText(text=""), **at)
        async for piece in pieces:
            if piece.text:
                self._text += piece.text
                yield self._event("response.output_text.delta", delta=piece.text, logprobs=[], **at)
        yield self._event("response.output_text.done", text=self._text, logprobs=[], **at)
        yield self._event("response.content_part.done", part=OutputText(text=self._text), **at)
        finished = self._finished()
        yield self._event("response.output_item.done", output_index=0, item=finished.output[0])
        kind = "incomplete" if finished.incomplete_details is not None else "completed"
        yield self._event(f"response.{kind}", response=finished)

    def error_event(self, error: ErrorResponse) -> str:
        failed = self._response("failed")
        failed.error = ResponseError(code=error.error.code or "server_error", message=error.error.message)
        return self._event("response.failed", response=failed)

    @property
    def last_event(self) -> str:
        return ""

    def _finished(self) -> ResponseObject:
        is_whole = self._account.finish_reason(0) == "stop"
        response = self._response("completed" if is_whole else "incomplete")
        response.output = [self._message("completed" if is_whole else "incomplete")]
        if not is_whole:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        usage = self._account.usage
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )
        if self._body.stage_timings:
            response.stage_timings = self._account.timings()
        return response

    def _response(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> ResponseObject:
        body = self._body
        return ResponseObject(
            id=self._account.request_id,
            created_at=self._account.created,
            status=status,
            model=body.model,
            output=[],
            instructions=body.instructions,
            metadata=body.metadata,
            temperature=body.temperature,
            top_p=body.top_p,
            max_output_tokens=body.max_output_tokens,
        )

    def _message(self, status: Literal["in_progress", "completed", "incomplete"]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=[OutputText(text=self._text)])

    def _event(self, kind: str, **fields: Any) -> str:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return sent_event(event, name=kind)
