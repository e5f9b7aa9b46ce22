"""Parses JSON request bodies, fast: a body with pictures has megabytes, and parsing blocks the event loop."""

import codecs
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response, params
from fastapi.routing import APIRoute
from pydantic_core import from_json

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
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            if self.body_field is not None and not isinstance(self.body_field.field_info, params.Form):
                _check_content_type(request.headers.get("content-type", ""))
            return await handle(_JsonRequest(request.scope, request.receive))

        return respond


def _check_content_type(content_type: str) -> None:
    name = content_type.partition(";")[0].strip().lower()
    if name != "application/json" and not (name.startswith("application/") and name.endswith("+json")):
        reason = f"has to be application/json for this route, got {content_type[:100]!r}"
        raise InvalidRequestError(reason, field="content-type", code="invalid_content_type")
