"""Maps errors to HTTP statuses and bodies in OpenAI's form, or in Anthropic's."""

import math
from itertools import pairwise
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from raylens.deployments.api.anthropic import AnthropicError, AnthropicErrorResponse
from raylens.deployments.api.wire import ErrorBody, ErrorResponse
from raylens.deployments.endpoint.admission import OverloadedError
from raylens.deployments.endpoint.deadline import DeadlineError
from raylens.deployments.stages import stage_calls
from raylens.preprocess.schema import InvalidRequestError

_PARTS = (
    *("text", "refusal", "input_text", "output_text", "image_url", "video_url", "audio_url"),
    *("input_image", "input_audio", "input_file", "image_embeds", "file"),
)
_ITEMS = (
    *("message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output"),
    *("image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"),
)
_SOURCES = ("base64", "url", "file")
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    "invalid_api_key": "authentication_error",
    "forbidden": "permission_error",
    "model_not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "stage_unavailable": "overloaded_error",
    "server_error": "api_error",
}
"""By our code, else by our type."""
_RETRY_SECONDS = 2.0
"""Retry-After for an unavailable stage: about the time in which Ray Serve replaces a replica."""

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 413, 422, 429, 431, 500, 503, 504)
}
"""The possible errors of a route, for its documentation. 422 is never sent; its entry replaces FastAPI's own."""

ANTHROPIC_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse} for status in ERROR_RESPONSES
}
"""The same for routes of Anthropic's API."""

_JSON_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
JSON_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": "see ErrorResponse", "content": _JSON_CONTENT} for status in ERROR_RESPONSES
}
"""The same for routes with other content than JSON. FastAPI would give their errors the answer's content type."""


class AccessError(PermissionError):
    """The sender may not send this request. `challenge`: the value of the WWW-Authenticate header."""

    def __init__(self, message: str, *, status: int, challenge: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.challenge = challenge


def add_error_handlers(api: FastAPI) -> None:
    """Answers every error with a JSON body in the form of the route's API."""
    own = (AccessError, InvalidRequestError, stage_calls.StageUnavailableError, OverloadedError, DeadlineError)
    for kind in (*own, HTTPException):
        api.add_exception_handler(kind, _on_error)
    api.add_exception_handler(Exception, _on_failure)
    api.add_exception_handler(RequestValidationError, _on_invalid_body)


def error_response(error: Exception) -> tuple[int, ErrorResponse]:
    """Returns the status and the body for an error. Internals stay in the log."""
    if isinstance(error, InvalidRequestError):
        return error.status, _body(str(error), "invalid_request_error", param=error.field, code=error.code)
    if isinstance(error, AccessError):
        code = "invalid_api_key" if error.status == 401 else "forbidden"
        return error.status, _body(str(error), "invalid_request_error", code=code)
    if isinstance(error, HTTPException):
        return error.status_code, _body(str(error.detail), "invalid_request_error")
    if isinstance(error, OverloadedError):
        return 429, _body(str(error), "rate_limit_error", code=f"overloaded_{error.reason}")
    if isinstance(error, stage_calls.StageUnavailableError):
        return 503, _body(f"{error}, try again", "server_error", code="stage_unavailable")
    if isinstance(error, DeadlineError):
        return 504, _body(str(error), "timeout_error", code="deadline_exceeded")
    if isinstance(error, stage_calls.PlugInFailedError):
        return 500, _body(str(error), "server_error", code="plug_in_failed")
    if isinstance(error, stage_calls.AdapterFailedError):
        return 500, _body(str(error), "server_error", code="adapter_failed")
    if isinstance(error, stage_calls.ChatTemplateFailedError):
        return 500, _body(str(error), "server_error", code="chat_template_failed")
    return 500, _body("internal error, see the server's log", "server_error")


def error_kind(error: Exception) -> tuple[str, str]:
    """Returns the labels of the error metric: the stage or "ingress", and the error's code or type."""
    if isinstance(error, HTTPException):
        return "ingress", f"http_{error.status_code}"
    stage = error.stage if isinstance(error, stage_calls.StageError) else "ingress"
    return stage, error_response(error)[1].error.code or type(error).__name__


def anthropic_error(body: ErrorResponse, request_id: str | None = None) -> AnthropicErrorResponse:
    """Returns the error in the form of Anthropic's API."""
    error = body.error
    kind = _ANTHROPIC_TYPES.get(error.code or "") or _ANTHROPIC_TYPES.get(error.type, error.type)
    told = AnthropicError(type=kind, message=error.message, param=error.param, code=error.code)
    return AnthropicErrorResponse(error=told, request_id=request_id)


def response_for(error: Exception, path: str = "") -> JSONResponse:
    """`path`: of the request, which tells whose form the body has."""
    status, body = error_response(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, AccessError) and error.challenge is not None:
        headers["www-authenticate"] = error.challenge
    if isinstance(error, OverloadedError | stage_calls.StageUnavailableError):
        seconds = error.retry_after_s if isinstance(error, OverloadedError) else _RETRY_SECONDS
        headers["retry-after"] = str(math.ceil(seconds))
    told = anthropic_error(body) if path.startswith(ANTHROPIC_PATH) else body
    return JSONResponse(told.model_dump(), status, headers)


def invalid_json(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"not valid JSON: {reason}", field="body", code="invalid_json")


def _body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> ErrorResponse:
    return ErrorResponse(error=ErrorBody(message=message, type=kind, param=param, code=code))


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    request.state.error = error  # for deployments/endpoint/access_log.py
    return response_for(error, request.url.path)


async def _on_failure(request: Request, error: Exception) -> JSONResponse:
    """Adds the traceparent header, because Starlette answers these errors outside of the gate."""
    response = await _on_error(request, error)
    if (traced := getattr(request.state, "traced", None)) is not None and traced.context.traceparent:
        response.headers["traceparent"] = traced.context.traceparent
    return response


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """Names the wrong field. Of several complaints about a union, the deepest one wins."""
    assert isinstance(error, RequestValidationError)
    worst = max(error.errors(), key=lambda problem: len(problem["loc"]))
    if worst["type"] == "json_invalid":
        return await _on_error(request, invalid_json(worst["ctx"]["error"]))
    return await _on_error(request, InvalidRequestError(worst["msg"], field=_field_name(worst["loc"])))


def _field_name(location: tuple[int | str, ...]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "text", "text") -> "messages[0].content[1].text".

    pydantic puts the names of union members between the fields: a type after a field, a tag after an index."""
    name = ""
    for before, part in pairwise(location):
        if isinstance(part, int):
            name += f"[{part}]"
        elif _is_field(part) and not _is_tag(before, part):
            name += f".{part[:64]}" if name else part[:64]  # a client's own names may be of any length
    return name or "body"


def _is_tag(before: int | str, part: str) -> bool:
    """Returns whether the part is the tag of a union member."""
    return part in (*_PARTS, *_ITEMS) if isinstance(before, int) else before == "source" and part in _SOURCES


def _is_field(part: str) -> bool:
    """Returns whether the part is a field rather than a union member's type. Type names begin with a capital letter."""
    return part.isidentifier() and part[0] == part[0].lower() and part not in ("str", "int")
