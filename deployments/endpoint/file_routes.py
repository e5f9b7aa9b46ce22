"""The routes of uploaded files: `/v1/files`."""

from typing import Annotated, Literal

from fastapi import FastAPI, Form, Query, UploadFile
from fastapi.responses import Response

from raylens.deployments.api.models import DeletedFile, File, FileList
from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.errors import ERROR_RESPONSES, JSON_ERROR_RESPONSES
from raylens.deployments.endpoint.pages import page
from raylens.deployments.item_store.shared_items import SharedUploads


class _Bytes(Response):
    media_type = "application/octet-stream"


class FileRoutes:
    def __init__(self, uploads: SharedUploads) -> None:
        self._uploads = uploads

    def add_to(self, api: FastAPI) -> None:
        files, file, content = "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"
        route = api.add_api_route
        route(files, self.upload, methods=["POST"], responses=ERROR_RESPONSES)
        route(files, self.files, methods=["GET"], responses=ERROR_RESPONSES)
        route(file, self.file, methods=["GET"], responses=ERROR_RESPONSES)
        route(file, self.delete, methods=["DELETE"], responses=ERROR_RESPONSES)
        route(content, self.content, methods=["GET"], response_class=_Bytes, responses=JSON_ERROR_RESPONSES)

    async def upload(
        self,
        call: HttpCall,
        file: UploadFile,
        purpose: Annotated[str, Form(max_length=64)] = "vision",
        expires_after_anchor: Annotated[Literal["created_at"], Form(alias="expires_after[anchor]")] = "created_at",
        expires_after_seconds: Annotated[int | None, Form(alias="expires_after[seconds]", ge=1)] = None,
    ) -> File:
        """Keeps a picture, a video or a sound for later requests of the same API key. These name it by its id: as
        `file_id` of `input_image`, or as the URL `upload:<id>` wherever a URL is taken. With the purpose `batch` it
        keeps a file of requests for `/v1/batches`. `expires_after` shortens the time that it is kept."""
        name, content = (file.filename or "")[:256], await file.read()
        upload = await self._uploads.add(
            call.caller.cache_salt, name, purpose, content, max_age_s=expires_after_seconds
        )
        return File.model_validate(upload)

    async def files(
        self,
        call: HttpCall,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "asc",
        after: str | None = None,
    ) -> FileList:
        """Lists the files of this API key, oldest first unless `order` says otherwise."""
        found = [one for one in await self._uploads.all(call.caller.cache_salt) if purpose in (None, one.purpose)]
        if order == "desc":
            found.reverse()
        return FileList.model_validate(page(found, [one.file_id for one in found], limit, after))

    async def file(self, file_id: str, call: HttpCall) -> File:
        """Describes a file of this API key."""
        return File.model_validate(await self._uploads.get(call.caller.cache_salt, file_id))

    async def content(self, file_id: str, call: HttpCall) -> Response:
        """Returns the file itself, as a download that a browser does not show."""
        content = await self._uploads.read(call.caller.cache_salt, file_id)
        return _Bytes(content, headers={"x-content-type-options": "nosniff"})

    async def delete(self, file_id: str, call: HttpCall) -> DeletedFile:
        """Deletes a file of this API key. Requests that have read it go on."""
        await self._uploads.delete(call.caller.cache_salt, file_id)
        return DeletedFile(id=file_id)
