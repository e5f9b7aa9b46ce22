"""The responses that the server keeps: conversations that go on from them, and the routes `/v1/responses/{id}`."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from pydantic_core import from_json, to_json

from raylens.deployments.api.response_items import AnyItem
from raylens.deployments.api.responses import ResponseObject, ResponsesRequest
from raylens.deployments.api.stored_responses import DeletedResponse, InputItemList, StoredInput
from raylens.deployments.endpoint.call import ApiCall, HttpCall
from raylens.deployments.endpoint.errors import ERROR_RESPONSES
from raylens.deployments.endpoint.gate import check_json, num_json_parts
from raylens.deployments.endpoint.pages import page
from raylens.deployments.endpoint.request_cost import RequestCost
from raylens.deployments.item_store.shared_items import SharedResponses
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

IN_WORK = ("queued", "in_progress")
_STORE_SECONDS = 2.0
"""How long an answer waits until it is stored."""


@dataclass(frozen=True, slots=True)
class ResponseStore:
    """The stored responses, each as a line of its input and one of its answer. `max_bytes`: of one conversation.
    `keeps`: whether the server stores any."""

    shared: SharedResponses
    max_bytes: int
    keeps: bool

    def is_to_keep(self, body: ResponsesRequest) -> bool:
        return self.keeps and body.store is not False

    async def recall(self, body: ResponsesRequest, call: ApiCall) -> None:
        """Puts the conversation that the request goes on from into it. Raises InvalidRequestError if the server does
        not have it, OverloadedError if there is no room for it."""
        if body.previous_response_id is None:
            return
        try:
            lines = await self.shared.conversation(call.caller.cache_salt, body.previous_response_id, self.max_bytes)
        except InvalidRequestError as error:
            if error.status != 404:
                raise
            field, code = "previous_response_id", "previous_response_not_found"  # and 400, as OpenAI's clients know it
            raise InvalidRequestError(error.reason, field=field, code=code) from error
        call.ticket.take(RequestCost(bytes=len(lines)))
        # What is long and looks like base64 is cut out, as it was out of the bodies that it came in.
        texts = call.texts
        cut = [texts.take(line) + texts.rest() for line in lines.split(b"\n")]
        try:
            check_json(sum(map(num_json_parts, cut)), sum(map(len, cut)))
        except InvalidRequestError as error:
            raise error.for_field("previous_response_id") from None
        history = list[AnyItem]()
        for line in cut:
            parsed = texts.restored(from_json(line))
            items = parsed if "input" in parsed else {"input": parsed["output"]}
            history += StoredInput.model_validate(items).input
        body.go_on_from(history)

    async def keep(self, body: ResponsesRequest, call: ApiCall, response: ResponseObject) -> None:
        """Stores a response. A failure is logged only: the client has its answer."""
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self.store(body, call, response)
        except Exception as error:
            logger.warning("response %s is not stored: %s: %s", response.id, type(error).__name__, error)

    async def store(self, body: ResponsesRequest, call: ApiCall, response: ResponseObject) -> None:
        number = len(body.items)
        ids = [f"{response.id.replace('resp_', 'in_', 1)}_{index}" for index in range(number)]
        items = [item.model_copy(update={"id": item.id or new}) for item, new in zip(body.items, ids, strict=True)]
        said = StoredInput(input=items).model_dump_json(exclude_none=True, by_alias=True)
        content = b"".join([*call.texts.pieces(said), b"\n", response.model_dump_json().encode()])
        await self.shared.store(call.caller.cache_salt, response.id, body.previous_response_id or "", content)

    def add_to(self, api: FastAPI) -> None:
        path, route = "/v1/responses/{response_id}", api.add_api_route
        route(path, self.response, methods=["GET"], response_model=ResponseObject, responses=ERROR_RESPONSES)
        route(path, self.delete, methods=["DELETE"], responses=ERROR_RESPONSES)
        route(f"{path}/cancel", self.cancel, methods=["POST"], response_model=ResponseObject, responses=ERROR_RESPONSES)
        route(f"{path}/input_items", self.input_items, methods=["GET"], responses=ERROR_RESPONSES)

    async def response(self, response_id: str, call: HttpCall, stream: bool = False) -> dict[str, Any]:
        """Returns a stored response of this API key. One that is made in the background says how far it is."""
        if stream:
            raise InvalidRequestError("a stored response comes as a whole only", field="stream")
        tenant = call.caller.cache_salt
        _, response = await self._read(tenant, response_id)
        if response["status"] in IN_WORK and not await self.shared.is_in_work(tenant, response_id):
            response["status"] = "failed"
            response["error"] = {"code": "server_error", "message": "the process that made this response has ended"}
        return response

    async def cancel(self, response_id: str, call: HttpCall) -> dict[str, Any]:
        """Ends the work on a response that is made in the background. One that is whole stays as it is."""
        tenant = call.caller.cache_salt
        said, response = await self._read(tenant, response_id)
        if not response["background"]:
            raise InvalidRequestError("was not made in the background, so it cannot be cancelled", field="response_id")
        if response["status"] in IN_WORK:
            await self.shared.cancel(tenant, response_id)
            response["status"] = "cancelled"
            content = b"\n".join([said, to_json(response)])
            await self.shared.store(tenant, response_id, response["previous_response_id"] or "", content)
        return response

    async def delete(self, response_id: str, call: HttpCall) -> DeletedResponse:
        """Deletes a response of this API key. Conversations that went on from it end."""
        await self.shared.cancel(call.caller.cache_salt, response_id)
        await self.shared.delete(call.caller.cache_salt, response_id)
        return DeletedResponse(id=response_id)

    async def _read(self, tenant: str, response_id: str) -> tuple[bytes, dict[str, Any]]:
        """Returns the line of its input, and the response."""
        said, _, answer = (await self.shared.read(tenant, response_id)).partition(b"\n")
        return said, from_json(answer)

    async def input_items(
        self,
        response_id: str,
        call: HttpCall,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> InputItemList:
        """Lists the items that a response was made from: its input, behind the conversation that it went on from."""
        lines = await self.shared.conversation(call.caller.cache_salt, response_id, self.max_bytes)
        items = [_told(item) for item in _items(lines)]
        if order == "desc":
            items.reverse()
        return InputItemList(**page(items, [item["id"] for item in items], limit, after))


def _items(lines: bytes) -> Iterator[dict[str, Any]]:
    """Yields the items of a conversation, without the last answer's."""
    answer: list[dict[str, Any]] = []
    for line in lines.split(b"\n"):
        parsed = from_json(line)
        if "input" in parsed:
            yield from answer
            yield from parsed["input"]
        else:
            answer = parsed["output"]


def _told(item: dict[str, Any]) -> dict[str, Any]:
    """Returns the item as OpenAI's API tells it, where a message always has parts."""
    if not isinstance(text := item.get("content"), str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": text}]}
