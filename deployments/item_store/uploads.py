"""Files that clients upload once and name in later requests."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from raylens.deployments.config import UploadConfig
from raylens.deployments.item_store.kept_files import KeptFile, KeptFiles
from raylens.preprocess.media import MediaLimits, check_size
from raylens.preprocess.schema import InvalidRequestError

_MAX_FILES = 16384
"""Files of all keys together. A shard lists its folder at startup, and each file takes two directory entries."""
_MAX_FILES_PER_KEY = 1024
"""Files of one API key: a sixteenth of all, so one key cannot take every place."""


@dataclass(frozen=True, slots=True)
class Upload(KeptFile):
    filename: str
    purpose: str


def _not_found(file_id: str) -> InvalidRequestError:
    reason = f"no file {file_id[:100]!r} (any more)"
    return InvalidRequestError(reason, field="file_id", code="file_not_found", status=404)


class Uploads(KeptFiles[Upload]):
    """The uploads of one shard's tenants."""

    folder_name = "uploads"
    not_found = staticmethod(_not_found)

    def __init__(
        self,
        config: UploadConfig,
        limits: MediaLimits,
        now: Callable[[], float] = time.time,
        *,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        super().__init__(Upload, config, now, shard, num_shards)
        self._limits = limits
        self._max_files = _MAX_FILES // num_shards

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        """`max_age_s`: the client's wish; the settings bound it.

        Raises InvalidRequestError for an empty or too large file, or if there is no room for one more."""
        try:
            check_size(content, limits=self._limits)
        except InvalidRequestError as error:
            raise error.for_field("file") from None
        num_files, limit = len(await self.all(tenant)), _MAX_FILES_PER_KEY
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
        expires = created + int(min(self._max_age_s, max_age_s or self._max_age_s))
        upload = Upload(f"file-{uuid.uuid4().hex}", len(content), created, expires, filename, purpose)
        await self.keep(tenant, upload, content)
        return upload


def _no_room(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{reason}; delete some", field="file", code="no_room", status=413)
