"""`GET /v1/models`: the one model that is served."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raylens"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
