"""Errors in OpenAI's form: which status and body each one becomes."""

from itertools import pairwise

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deployments.protocol import ErrorBody, ErrorResponse
from deployments.stage_calls import StageUnavailableError
from preprocess.schema import InvalidRequestError

_PART_TYPES = ("text", "image_url")


def add_error_handlers(api: FastAPI) -> None:
    """Makes every error that leaves a route a JSON body in OpenAI's form."""
    api.add_exception_handler(InvalidRequestError, _on_error)
    api.add_exception_handler(StageUnavailableError, _on_error)
    api.add_exception_handler(Exception, _on_error)
    api.add_exception_handler(RequestValidationError, _on_invalid_body)
    api.add_exception_handler(HTTPException, _on_http_error)


def error_response(error: Exception) -> tuple[int, ErrorResponse]:
    """Status and body for an error. Internals stay in the log."""
    if isinstance(error, InvalidRequestError):
        body = ErrorBody(message=str(error), type="invalid_request_error", param=error.field, code=error.code)
        return error.status, ErrorResponse(error=body)
    if isinstance(error, StageUnavailableError):
        body = ErrorBody(message=f"{error}, try again", type="server_error", param=None, code="stage_unavailable")
        return 503, ErrorResponse(error=body)
    body = ErrorBody(message="internal error, see the server's log", type="server_error", param=None, code=None)
    return 500, ErrorResponse(error=body)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status, body = error_response(error)
    headers = {"retry-after": "2"} if status == 503 else None
    return JSONResponse(body.model_dump(), status, headers)


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """Names the field that is wrong; of a union's several complaints, the one that reached deepest."""
    assert isinstance(error, RequestValidationError)
    worst = max(error.errors(), key=lambda problem: len(problem["loc"]))
    if worst["type"] == "json_invalid":
        return await _on_error(request, InvalidRequestError("not valid JSON", field="body", code="invalid_json"))
    field = _field_name(worst["loc"])
    return await _on_error(request, InvalidRequestError(worst["msg"], field=field))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = ErrorBody(message=str(error.detail), type="invalid_request_error", param=None, code=None)
    return JSONResponse(ErrorResponse(error=body).model_dump(), error.status_code, error.headers)


def _field_name(location: tuple[int | str, ...]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "text", "text") -> "messages[0].content[1].text".

    pydantic puts the names of union members between the fields: a type after a field, a tag after an index.
    """
    name = ""
    for before, part in pairwise(location):
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part != "str" and not (isinstance(before, int) and part in _PART_TYPES):
            name += f".{part[:64]}" if name else part[:64]  # a client's own names may be of any length
    return name or "body"
