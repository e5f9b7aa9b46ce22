"""Parses JSON request bodies, fast: a body with pictures has megabytes, and parsing blocks the event loop."""

import codecs
import json
from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any

from fastapi import Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from raylens.deployments.endpoint.call import call_of
from raylens.deployments.endpoint.errors import invalid_json
from raylens.preprocess.schema import InvalidRequestError


class _JsonRequest(Request):
    async def body(self) -> bytes:
        """Returns the body like Starlette's method, but without a copy if it came as one piece."""
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream() if piece]
            self._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        """Parses the body. Raises JSONDecodeError, also for more than 200 levels and for lone surrogates."""
        body = await self.body()
        try:
            return self.state.texts.restored(from_json(body.removeprefix(codecs.BOM_UTF8)))
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """Calls a function that takes a body and a call, and returns a Response itself, without FastAPI's dependencies and
    serialization, which it does not use."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        is_direct = signature(self.endpoint).return_annotation is Response and self.body_field is not None
        handle = self._call if is_direct else super().get_route_handler()

        async def respond(request: Request) -> Response:
            if self.body_field is not None and not isinstance(self.body_field.field_info, params.Form):
                _check_content_type(request.headers.get("content-type", ""))
            return await handle(_JsonRequest(request.scope, request.receive))

        return respond

    async def _call(self, request: Request) -> Response:
        assert self.body_field is not None
        if not await request.body():
            raise InvalidRequestError("Field required", field="body")
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise invalid_json(error.msg) from error
        value, errors = self.body_field.validate(body, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=body)
        response: Response = await self.endpoint(value, call_of(request))
        return response


def _check_content_type(content_type: str) -> None:
    name = content_type.partition(";")[0].strip().lower()
    if name != "application/json" and not (name.startswith("application/") and name.endswith("+json")):
        reason = f"has to be application/json for this route, got {content_type[:100]!r}"
        raise InvalidRequestError(reason, field="content-type", code="invalid_content_type")
