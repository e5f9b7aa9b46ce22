"""Files that clients upload once and name in later requests, and files of answers that batches write."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from raylens.deployments.config import UploadConfig
from raylens.deployments.item_store.kept_files import KeptFile, KeptFiles, no_room
from raylens.deployments.item_store.line_file import append_line, whole_lines
from raylens.preprocess.media import MediaLimits, check_size
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

BATCH = "batch"
"""The purpose of a file of requests."""
_MAX_FILES = 16384
"""Files of all keys together. A shard lists its folder at startup, and each file takes two directory entries."""
_MAX_FILES_PER_KEY = 1024
"""Files of one API key: a sixteenth of all, so one key cannot take every place."""
_MAX_BATCH_BYTES = 64 * 2**20
"""Bytes of a file of requests. The ingress that works on the batch holds it in memory."""
_MAX_BATCH_LINES = 50_000
"""Lines of a file of requests, as OpenAI's. A shard holds the `custom_id` of each answered one in memory."""


@dataclass(frozen=True, slots=True)
class Upload(KeptFile):
    """`grows`: lines are still appended to the file. Its tenant sees it afterwards."""

    filename: str
    purpose: str
    grows: bool = False


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
        self._written -= {one.file_id for files in self._by_tenant.values() for one in files.values() if one.grows}
        self._limits = limits
        self._max_files = _MAX_FILES // num_shards

    def _found(self, file: Upload) -> Upload:
        return replace(file, num_bytes=sum(map(len, self._lines(file)))) if file.grows else super()._found(file)

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        """`max_age_s`: the client's wish; the settings bound it.

        Raises InvalidRequestError for an empty or too large file, or if there is no room for one more."""
        if purpose == BATCH:
            await asyncio.to_thread(_check_batch, content)
        else:
            try:
                check_size(content, limits=self._limits)
            except InvalidRequestError as error:
                raise error.for_field("file") from None
        await self.check_number(tenant, self._max_files, _MAX_FILES_PER_KEY)
        self._check_bytes(len(content))
        created = int(self._now())
        upload = Upload(
            f"file-{uuid.uuid4().hex}", len(content), created, created + self._age(max_age_s), filename, purpose
        )
        await self.keep(tenant, upload, content)
        return upload

    def _age(self, max_age_s: float | None) -> int:
        return int(min(self._max_age_s, max_age_s or self._max_age_s))

    def _check_bytes(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._max_bytes:
            raise no_room(
                f"{num_bytes} bytes more than the {self.num_bytes} that all files have would be over the limit of"
                f" {self._max_bytes}; delete some"
            )

    async def append(self, tenant: str, file_id: str, filename: str, purpose: str, line: bytes) -> None:
        """Appends to a file, which the first line creates. Raises InvalidRequestError if there is no room. Call it for
        one line of a file at a time, and do not cancel it."""
        self._check_bytes(len(line))
        file = self._by_tenant.get(tenant, {}).get(file_id)
        if file is None:
            created = int(self._now())
            file = Upload(file_id, 0, created, created + self._age(None), filename, purpose, grows=True)
        longer = replace(file, num_bytes=file.num_bytes + len(line))
        self._enter(tenant, longer)
        try:
            await asyncio.to_thread(self._append, tenant, file, line)
        except OSError as error:
            self._enter(tenant, file)
            raise no_room(f"{error.strerror}, with {self.num_bytes} bytes of files") from error

    def _append(self, tenant: str, file: Upload, line: bytes) -> None:
        if not file.num_bytes:
            self._note(tenant, file)
        with self._path(file).open("ab", buffering=0) as lines:
            append_line(lines, line)

    def lines(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """Yields the lines of a file that grows, none if there is no such file. Blocks."""
        if (file := self._by_tenant.get(tenant, {}).get(file_id)) is not None:
            yield from self._lines(file)

    def _lines(self, file: Upload) -> Iterator[bytes]:
        return whole_lines(self._path(file)) if self._path(file).exists() else iter(())

    async def finish(self, tenant: str, file_id: str, max_age_s: float | None) -> None:
        """Shows a file to its tenant that has grown until now, if there is one. On a full disk it still grows for the
        next shard, which finishes it."""
        if (finished := self._finished(tenant, file_id, max_age_s)) is None:
            return
        self._show(tenant, finished)
        try:
            await asyncio.to_thread(self._note, tenant, finished)
        except OSError as error:
            logger.warning("%s is not finished on disk: %s", file_id, error.strerror)

    def finish_at_start(self, tenant: str, file_id: str, max_age_s: float | None) -> None:
        """The same for a file that an earlier shard left. Blocks. Raises OSError."""
        if (finished := self._finished(tenant, file_id, max_age_s)) is not None:
            self._show(tenant, finished)
            self._note(tenant, finished)

    def _finished(self, tenant: str, file_id: str, max_age_s: float | None) -> Upload | None:
        file = self._by_tenant.get(tenant, {}).get(file_id)
        if file is None or not file.grows or not self._path(file).exists():
            return None
        # Not by the appended lines: during an update another shard may append, too.
        num_bytes = self._path(file).stat().st_size
        expires = int(self._now()) + self._age(max_age_s)
        return replace(file, grows=False, num_bytes=num_bytes, expires_at=expires)

    def _show(self, tenant: str, file: Upload) -> None:
        self._enter(tenant, file)
        self._written.add(file.file_id)


def _check_batch(content: bytes) -> None:
    """Raises InvalidRequestError for an empty or too large file of requests."""
    if not content.strip():
        raise InvalidRequestError("has no requests", field="file", code="empty_batch")
    num_lines = content.count(b"\n") + (not content.endswith(b"\n"))
    for number, unit, limit in (
        (len(content), "bytes", _MAX_BATCH_BYTES),
        (num_lines, "lines", _MAX_BATCH_LINES),
    ):
        if number > limit:
            reason = f"a batch of {number} {unit}, the limit is {limit}"
            raise InvalidRequestError(reason, field="file", code="batch_too_large", status=413)
