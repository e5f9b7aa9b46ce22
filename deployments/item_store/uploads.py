"""Files that clients upload once and name in later requests. Only the API key that uploaded a file can use it.

A metadata file beside each upload on disk lets the folder's next owner find it."""

import asyncio
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from raylens.deployments.config import UploadConfig
from raylens.preprocess.media import MediaLimits, check_size
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

FOLDER_VARIABLE = "RAYLENS_FOLDER"
"""Environment variable: this user's folder on a node for the server's files. Default: a temporary folder that is
deleted with the process."""
_KNOWN = ".json"
_MAX_FILES = 16384
"""Files of all keys together. A shard lists its folder at startup, and each file takes two directory entries."""
_MAX_FILES_PER_KEY = 1024
"""Files of one API key: a sixteenth of all, so one key cannot take every place."""


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
    """The uploads of one shard's tenants, in a folder that only this user may enter. Use it on one event loop. Disk
    access runs on threads."""

    def __init__(
        self,
        config: UploadConfig,
        limits: MediaLimits,
        now: Callable[[], float] = time.time,
        *,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        self._config = config
        self._limits = limits
        self._now = now
        self._max_files, self._max_bytes = _MAX_FILES // num_shards, config.max_bytes // num_shards
        parent = config.folder or os.environ.get(FOLDER_VARIABLE)
        if parent is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="raylens-")
            parent = self._temporary.name
        self._folder = Path(parent) / f"uploads-{shard}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Includes files that are still being written, which count but are not visible to requests.
        self._by_tenant: dict[str, dict[str, Upload]] = {}
        self._written: set[str] = set()
        self.num_bytes = 0
        self._take_over()

    def _take_over(self) -> None:
        """Loads the uploads that are already in the folder and deletes incomplete ones."""
        whole: set[Path] = set()
        for known in self._folder.glob(f"*{_KNOWN}"):
            try:
                fields = json.loads(known.read_bytes())
                tenant, upload = fields.pop("tenant"), Upload(**fields)
                if self._path(upload).stat().st_size != upload.num_bytes:
                    continue
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("upload %s is not kept: %s", known.stem, type(error).__name__)
                continue
            whole |= {known, self._path(upload)}
            self._by_tenant.setdefault(tenant, {})[upload.file_id] = upload
            self._written.add(upload.file_id)
            self.num_bytes += upload.num_bytes
        for path in set(self._folder.glob("file-*")) - whole:
            path.unlink()

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        """`max_age_s`: the client's wish; the settings bound it.

        Raises InvalidRequestError for an empty or too large file, or if there is no room for one more."""
        try:
            check_size(content, limits=self._limits)
        except InvalidRequestError as error:
            raise error.for_field("file") from None
        await self._delete_old()
        num_files, limit = len(self._by_tenant.get(tenant, {})), _MAX_FILES_PER_KEY
        if num_files >= limit:
            raise _no_room(f"{num_files} files are kept for this API key, the limit is {limit}")
        if self.num_files >= self._max_files:
            raise _no_room(f"{self._max_files} files are kept, which is the limit")
        if self.num_bytes + len(content) > self._max_bytes:
            raise _no_room(
                f"{len(content)} bytes more than the {self.num_bytes} that all files have would be over the limit of"
                f" {self._max_bytes}"
            )
        created = int(self._now())
        expires = created + int(min(self._config.max_age_s, max_age_s or self._config.max_age_s))
        upload = Upload(f"file-{uuid.uuid4().hex}", filename, purpose, len(content), created, expires)
        self.num_bytes += len(content)
        self._by_tenant.setdefault(tenant, {})[upload.file_id] = upload
        try:
            await asyncio.to_thread(self._write, tenant, upload, content)
        except BaseException:
            await self._remove(tenant, upload)
            raise
        self._written.add(upload.file_id)
        return upload

    def _write(self, tenant: str, upload: Upload, content: bytes) -> None:
        """Runs on a thread. Deletes the file again if the client left meanwhile."""
        self._path(upload).write_bytes(content)
        self._known(upload).write_text(json.dumps({"tenant": tenant, **asdict(upload)}))
        if upload.file_id not in self._by_tenant.get(tenant, {}):
            self._unlink(upload)

    def _unlink(self, upload: Upload) -> None:
        self._known(upload).unlink(missing_ok=True)
        self._path(upload).unlink(missing_ok=True)

    @property
    def num_files(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    async def all(self, tenant: str) -> list[Upload]:
        """Returns a tenant's files, oldest first."""
        await self._delete_old()
        return [one for one in self._by_tenant.get(tenant, {}).values() if one.file_id in self._written]

    async def get(self, tenant: str, file_id: str) -> Upload:
        """Raises InvalidRequestError with status 404 if the file does not exist or belongs to another tenant."""
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
        self.num_bytes -= upload.num_bytes
        await asyncio.to_thread(self._unlink, upload)

    def _path(self, upload: Upload) -> Path:
        return self._folder / upload.file_id

    def _known(self, upload: Upload) -> Path:
        """Returns the path of an upload's metadata file."""
        return self._folder / f"{upload.file_id}{_KNOWN}"


def _not_found(file_id: str) -> InvalidRequestError:
    reason = f"no file {file_id[:100]!r} (any more)"
    return InvalidRequestError(reason, field="file_id", code="file_not_found", status=404)


def _no_room(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{reason}; delete some", field="file", code="no_room", status=413)
