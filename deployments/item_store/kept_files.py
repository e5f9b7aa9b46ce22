"""Files of tenants on disk, bounded in number, bytes and age. Only the tenant whose file it is can use it.

A metadata file beside each one lets the folder's next owner find it."""

import asyncio
import json
import logging
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from raylens.deployments.config import KeptFilesConfig
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

FOLDER_VARIABLE = "RAYLENS_FOLDER"
"""Environment variable: this user's folder on a node for the server's files. Default: a temporary folder that is
deleted with the process."""
_KNOWN = ".json"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """`created_at` and `expires_at` in seconds since 1970."""

    file_id: str
    num_bytes: int
    created_at: int
    expires_at: int


FileT = TypeVar("FileT", bound=KeptFile)


class KeptFiles(Generic[FileT]):
    """The files of one shard's tenants, in a folder that only this user may enter. Use it on one event loop. Disk
    access runs on threads."""

    folder_name: str
    """The beginning of the folder's name. Subclasses set it."""
    unit = "files"
    """In messages."""
    not_found: Callable[[str], InvalidRequestError]
    """The error for the id of a file that the tenant does not have. Subclasses set it."""

    def __init__(
        self, kind: type[FileT], config: KeptFilesConfig, now: Callable[[], float], shard: int, num_shards: int
    ) -> None:
        self._kind = kind
        self._max_age_s = config.max_age_s
        self._now = now
        self._max_bytes = config.max_bytes // num_shards
        parent = config.folder or os.environ.get(FOLDER_VARIABLE)
        if parent is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="raylens-")
            parent = self._temporary.name
        self._folder = Path(parent) / f"{self.folder_name}-{shard}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Includes files that are still being written, which count but are not visible to requests.
        self._by_tenant: dict[str, dict[str, FileT]] = {}
        self._written: set[str] = set()
        self._bytes_of: Counter[str] = Counter()
        self._next_expiry = math.inf
        self._take_over()

    def _take_over(self) -> None:
        """Loads the files that are already in the folder and deletes incomplete ones."""
        whole: set[Path] = set()
        found: list[tuple[str, FileT]] = []
        for known in self._folder.glob(f"*{_KNOWN}"):
            try:
                fields = json.loads(known.read_bytes())
                tenant, file = fields.pop("tenant"), self._found(self._kind(**fields))
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("%s is not kept: %s", known.stem, type(error).__name__)
                continue
            whole |= {known, self._path(file)}
            found.append((tenant, file))
        for tenant, file in sorted(found, key=lambda one: one[1].created_at):
            self._enter(tenant, file)
            self._written.add(file.file_id)
        for path in set(self._folder.iterdir()) - whole:
            path.unlink()

    def _found(self, file: FileT) -> FileT:
        """Returns a file of the folder as it is. Raises OSError or ValueError for one that is not whole."""
        if file.num_bytes and (num_bytes := self._path(file).stat().st_size) != file.num_bytes:
            raise ValueError(f"{num_bytes} bytes in place of {file.num_bytes}")
        return file

    async def keep(self, tenant: str, file: FileT, content: bytes = b"") -> None:
        """Writes a file for which there is room. Without content there is only its metadata file."""
        self._enter(tenant, file)
        try:
            await asyncio.to_thread(self._write, tenant, file, content)
        except BaseException:
            await self.remove(tenant, file)
            raise
        self._written.add(file.file_id)

    def _enter(self, tenant: str, file: FileT) -> None:
        """Also puts a file in place of an earlier description of it."""
        files = self._by_tenant.setdefault(tenant, {})
        earlier = files.get(file.file_id)
        files[file.file_id] = file
        self._bytes_of[tenant] += file.num_bytes - (earlier.num_bytes if earlier else 0)
        self._next_expiry = min(self._next_expiry, file.expires_at)

    def _write(self, tenant: str, file: FileT, content: bytes) -> None:
        """Runs on a thread. Deletes the file again if the client left meanwhile."""
        if content:
            self._path(file).write_bytes(content)
        self._note(tenant, file)
        if file.file_id not in self._by_tenant.get(tenant, {}):
            self._unlink(file)

    def _note(self, tenant: str, file: FileT) -> None:
        """Writes the metadata file. Whoever reads it finds the old one or the new one."""
        new = self._folder / f"{file.file_id}.new"
        new.write_text(json.dumps({"tenant": tenant, **asdict(file)}))
        new.replace(self._known(file))

    def _unlink(self, file: FileT) -> None:
        self._known(file).unlink(missing_ok=True)
        self._path(file).unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return self._bytes_of.total()

    @property
    def num_files(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    async def all(self, tenant: str) -> list[FileT]:
        """Returns a tenant's files, oldest first."""
        await self.remove_old()
        return [one for one in self._by_tenant.get(tenant, {}).values() if one.file_id in self._written]

    async def get(self, tenant: str, file_id: str) -> FileT:
        """Raises InvalidRequestError with status 404 if the file does not exist or belongs to another tenant."""
        await self.remove_old()
        file = self._by_tenant.get(tenant, {}).get(file_id)
        if file is None or file_id not in self._written:
            raise self.not_found(file_id)
        return file

    async def read(self, tenant: str, file_id: str) -> bytes:
        """Raises InvalidRequestError like `get`."""
        file = await self.get(tenant, file_id)
        try:
            return await asyncio.to_thread(self._path(file).read_bytes)
        except FileNotFoundError:
            raise self.not_found(file_id) from None  # deleted meanwhile

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises InvalidRequestError like `get`."""
        await self.remove(tenant, await self.get(tenant, file_id))

    async def remove_old(self) -> None:
        """Looks through the files only when one is due: there may be tens of thousands, and each request asks."""
        if (now := self._now()) < self._next_expiry:
            return
        for tenant, files in list(self._by_tenant.items()):
            for file in [one for one in files.values() if one.expires_at <= now and one.file_id in self._written]:
                try:
                    await self.expire(tenant, file)
                except OSError as error:  # its file is left for the next shard
                    logger.warning("%s is not removed: %s", file.file_id, error.strerror)
        left = (one.expires_at for files in self._by_tenant.values() for one in files.values())
        self._next_expiry = min((one for one in left if one > now), default=math.inf)

    async def expire(self, tenant: str, file: FileT) -> None:
        await self.remove(tenant, file)

    async def check_number(self, tenant: str, max_files: int, max_of_tenant: int) -> None:
        """Raises InvalidRequestError if there is no place for one more file."""
        if (number := len(await self.all(tenant))) >= max_of_tenant:
            raise no_room(f"{number} {self.unit} are kept for this API key, the limit is {max_of_tenant}")
        if self.num_files >= max_files:
            raise no_room(f"{max_files} {self.unit} are kept, which is the limit")

    async def remove(self, tenant: str, file: FileT) -> None:
        files = self._by_tenant.get(tenant, {})
        if files.pop(file.file_id, None) is None:
            return
        self._written.discard(file.file_id)
        self._bytes_of[tenant] -= file.num_bytes
        if not files:
            del self._by_tenant[tenant], self._bytes_of[tenant]
        await asyncio.to_thread(self._unlink, file)

    def _path(self, file: FileT) -> Path:
        return self._folder / file.file_id

    def _known(self, file: FileT) -> Path:
        """Returns the path of a file's metadata file."""
        return self._folder / f"{file.file_id}{_KNOWN}"


def no_room(reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, field="file", code="no_room", status=413)
