"""`/v1/files`: the description of an uploaded file."""

from typing import Literal

from pydantic import BaseModel

from raylens.deployments.item_store.uploads import Upload


class File(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, upload: Upload) -> "File":
        return cls(
            id=upload.file_id,
            bytes=upload.num_bytes,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
            filename=upload.filename,
            purpose=upload.purpose,
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[File]
    has_more: Literal[False] = False


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
