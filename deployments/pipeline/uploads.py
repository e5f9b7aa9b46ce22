"""Files that clients send once and name in later requests. They lie on disk, each for the API key that sent it only."""

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.config import UploadConfig
from preprocess.media import MediaLimits, check_size
from preprocess.schema import InvalidRequestError

FOLDER_VARIABLE = "RAYLENS_UPLOADS_FOLDER"
"""Names the variable with the folder in which files are kept. By default that is the system's folder for temporary
files."""


@dataclass(frozen=True, slots=True)
class Upload:
    """`created_at` and `expires_at` in seconds since 1970."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int


class Uploads:
    """The uploads of one endpoint; they are deleted when it stops. Use it on one event loop. Threads use the disk."""

    def __init__(self, config: UploadConfig, limits: MediaLimits, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self._limits = limits
        self._now = now
        self._folder = tempfile.TemporaryDirectory(prefix="raylens-uploads-", dir=os.environ.get(FOLDER_VARIABLE))
        # Files that are still being written count, too, but no request sees them.
        self._by_tenant: dict[str, dict[str, Upload]] = {}
        self._written: set[str] = set()
        self._num_bytes = 0

    def close(self) -> None:
        self._folder.cleanup()

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        """`max_age_s`: when the client wants the file deleted; never later than the settings say.

        Raises InvalidRequestError for an empty or too large file, or where there is no room for one more.
        """
        try:
            check_size(content, limits=self._limits)
        except InvalidRequestError as error:
            raise error.for_field("file") from None
        await self._delete_old()
        num_files, limit = len(self._by_tenant.get(tenant, {})), self._config.max_files_per_key
        if num_files >= limit:
            raise _no_room(f"{num_files} files are kept for this API key, the limit is {limit}")
        if sum(map(len, self._by_tenant.values())) >= self._config.max_files:
            raise _no_room(f"{self._config.max_files} files are kept, which is the limit")
        if self._num_bytes + len(content) > self._config.max_bytes:
            raise _no_room(
                f"{len(content)} bytes more than the {self._num_bytes} that all files have would be over the limit of"
                f" {self._config.max_bytes}"
            )
        created = int(self._now())
        expires = created + int(min(self._config.max_age_s, max_age_s or self._config.max_age_s))
        upload = Upload(f"file-{uuid.uuid4().hex}", filename, purpose, len(content), created, expires)
        self._num_bytes += len(content)
        self._by_tenant.setdefault(tenant, {})[upload.file_id] = upload
        try:
            await asyncio.to_thread(self._write, tenant, upload, content)
        except BaseException:
            await self._remove(tenant, upload)
            raise
        self._written.add(upload.file_id)
        return upload

    def _write(self, tenant: str, upload: Upload, content: bytes) -> None:
        """Runs on a thread. If the client has left meanwhile, the thread deletes what it has written."""
        self._path(upload).write_bytes(content)
        if upload.file_id not in self._by_tenant.get(tenant, {}):
            self._path(upload).unlink(missing_ok=True)

    async def all(self, tenant: str) -> list[Upload]:
        """Returns a tenant's files, oldest first."""
        await self._delete_old()
        return [one for one in self._by_tenant.get(tenant, {}).values() if one.file_id in self._written]

    async def get(self, tenant: str, file_id: str) -> Upload:
        """Raises InvalidRequestError, with status 404, for a file that is not there, or not this tenant's."""
        await self._delete_old()
        upload = self._by_tenant.get(tenant, {}).get(file_id)
        if upload is None or file_id not in self._written:
            raise _not_found(file_id)
        return upload

    async def read(self, tenant: str, file_id: str) -> bytes:
        """Raises InvalidRequestError like `get`."""
        upload = await self.get(tenant, file_id)
        try:
            return await asyncio.to_thread(self._path(upload).read_bytes)
        except FileNotFoundError:
            raise _not_found(file_id) from None  # deleted meanwhile

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises InvalidRequestError like `get`."""
        await self._remove(tenant, await self.get(tenant, file_id))

    async def _delete_old(self) -> None:
        now = self._now()
        for tenant, files in list(self._by_tenant.items()):
            for upload in [one for one in files.values() if one.expires_at <= now and one.file_id in self._written]:
                await self._remove(tenant, upload)

    async def _remove(self, tenant: str, upload: Upload) -> None:
        files = self._by_tenant.get(tenant, {})
        if files.pop(upload.file_id, None) is None:
            return
        if not files:
            del self._by_tenant[tenant]
        self._written.discard(upload.file_id)
        self._num_bytes -= upload.num_bytes
        await asyncio.to_thread(self._path(upload).unlink, True)

    def _path(self, upload: Upload) -> Path:
        return Path(self._folder.name) / upload.file_id


def _not_found(file_id: str) -> InvalidRequestError:
    reason = f"no file {file_id[:100]!r} (any more)"
    return InvalidRequestError(reason, field="file_id", code="file_not_found", status=404)


def _no_room(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{reason}; delete some", field="file", code="no_room", status=413)
