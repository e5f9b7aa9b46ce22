"""`GET /v1/models`: the one model that is served. `GET /health`: how it is."""

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


class Health(BaseModel):
    """`stages` by name: "ready", "starting" or "unresponsive"; all are ready where `ready` is true."""

    ready: bool
    stages: dict[str, str]
