"""`/v1/responses/{id}`: stored responses, and the items that they were made from."""

from typing import Any, Literal

from pydantic import BaseModel

from raylens.deployments.api.response_items import Item


class StoredInput(BaseModel):
    """The items that a request added to its conversation."""

    input: list[Item]


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
