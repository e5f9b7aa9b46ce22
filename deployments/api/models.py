"""`/v1/models`, `/health`, `/version` and `/v1/files`: descriptions of what the server has."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelCard(BaseModel):
    """A served model, or one of its LoRA adapters. `max_model_len`: tokens of prompt and answer together. `modalities`:
    the kinds of media that the model takes. `root`: the name of the loaded model or adapter. `parent`: the adapter's
    model, null for a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raylens"
    root: str
    parent: str | None = None
    max_model_len: int | None
    modalities: list[str] | None


class Version(BaseModel):
    version: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """`stages` maps each stage's name to "ready", "starting", "absent" or "unresponsive". The stages of a further model
    have its name at the end, such as `generate-NAME`. `ready`: all stages are ready. `details`: what stages report
    about themselves, such as the kernels of a stage on the CPU."""

    ready: bool
    stages: dict[str, str]
    details: dict[str, dict[str, str]]


class File(BaseModel):
    # Read from `deployments.item_store.uploads.Upload`.
    model_config = ConfigDict(from_attributes=True)

    id: str = Field(validation_alias="file_id")
    object: Literal["file"] = "file"
    bytes: int = Field(validation_alias="num_bytes")
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
