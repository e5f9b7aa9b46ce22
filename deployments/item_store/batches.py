"""Batches: files of requests that ingresses answer below live traffic, and how far each one is.

A batch outlives the ingress that works on it and its shard. Its answers lie in files of the shard's uploads, line by
line as they come. Those files are the record of what is done."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json, to_json

from raylens.deployments.config import UploadConfig
from raylens.deployments.item_store.kept_files import KeptFile, KeptFiles
from raylens.deployments.item_store.uploads import BATCH, Uploads
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

WINDOW_SECONDS = 24 * 3600
"""A batch that has not ended by then expires: OpenAI's only `completion_window`."""
_MAX_BATCHES = 16384
"""Batches of all keys together. A shard reads each one at startup."""
_MAX_BATCHES_PER_KEY = 1024
_IN_PASSING = {"completed": "finalizing", "cancelled": "cancelling"}
"""The status while an end is written."""


@dataclass(frozen=True, slots=True)
class Batch(KeptFile):
    """`times`: when the batch came to each status, in seconds since 1970. `num_total`, `num_completed`, `num_failed`:
    requests; the last two are written at the end. `output_max_age_s`: the client's wish for the files of answers.
    `expires_at`: of the work, and after its end of this record."""

    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None = None
    output_max_age_s: int | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def output_file_id(self) -> str:
        return f"{self.file_id.replace('batch_', 'file-', 1)}-output"

    @property
    def error_file_id(self) -> str:
        return f"{self.file_id.replace('batch_', 'file-', 1)}-errors"


@dataclass(eq=False, slots=True)
class _OpenBatch:
    """A batch that has not ended. `answered`: the ids of its requests whose answers are on disk, `failed` of them with
    an error. `writing`: held while the batch changes. `is_held`: an ingress works on it."""

    tenant: str
    batch_id: str
    answered: set[str] = field(default_factory=set)
    num_failed: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_held: bool = False


def _not_found(batch_id: str) -> InvalidRequestError:
    reason = f"no batch {batch_id[:100]!r} (any more)"
    return InvalidRequestError(reason, field="batch_id", code="batch_not_found", status=404)


class Batches(KeptFiles[Batch]):
    """The batches of one shard's tenants. `describe` and the like return the fields of OpenAI's batch object."""

    folder_name = unit = "batches"
    not_found = staticmethod(_not_found)

    def __init__(
        self,
        config: UploadConfig,
        uploads: Uploads,
        now: Callable[[], float] = time.time,
        *,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """`uploads`: of the same shard, for the files of requests and answers."""
        super().__init__(Batch, config, now, shard, num_shards)
        self._uploads = uploads
        self._max_batches = _MAX_BATCHES // num_shards
        self._open: dict[str, _OpenBatch] = {}
        self._freed = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        for tenant, batches in self._by_tenant.items():
            for batch in batches.values():
                try:
                    self._take_up(tenant, batch)
                except (OSError, ValueError, KeyError) as error:
                    logger.warning("batch %s cannot go on: %r", batch.file_id, error)

    def _take_up(self, tenant: str, batch: Batch) -> None:
        """Goes on with a batch of an earlier shard."""
        if _has_ended(batch):  # the shard may have ended between the two writes
            for file_id in (batch.output_file_id, batch.error_file_id):
                self._uploads.finish_at_start(tenant, file_id, batch.output_max_age_s)
            return
        opened = self._open[batch.file_id] = _OpenBatch(tenant, batch.file_id)
        failed = self._ids_in(tenant, batch.error_file_id)
        opened.num_failed = len(failed)
        opened.answered = failed | self._ids_in(tenant, batch.output_file_id)

    def _ids_in(self, tenant: str, file_id: str) -> set[str]:
        """Returns the ids of the requests that a file has answers to."""
        return {from_json(line)["custom_id"] for line in self._uploads.lines(tenant, file_id)}

    async def create(
        self,
        tenant: str,
        input_file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_max_age_s: int | None,
    ) -> dict[str, Any]:
        """Raises InvalidRequestError without such a file of requests, or if there is no room for one more batch."""
        try:
            given = await self._uploads.get(tenant, input_file_id)
        except InvalidRequestError as error:
            raise error.for_field("input_file_id") from None
        if given.purpose != BATCH:
            reason = f"a file of the purpose {given.purpose[:64]!r}, a batch takes one of {BATCH!r}"
            raise InvalidRequestError(reason, field="input_file_id")
        await self.check_number(tenant, self._max_batches, _MAX_BATCHES_PER_KEY)
        created = int(self._now())
        batch_id, expires = f"batch_{uuid.uuid4().hex}", created + WINDOW_SECONDS
        batch = Batch(batch_id, 0, created, expires, input_file_id, endpoint, metadata, output_max_age_s)
        await self.keep(tenant, batch)
        self._open[batch_id] = _OpenBatch(tenant, batch_id)
        self._freed.set()
        return self._told(batch)

    async def describe(self, tenant: str, batch_id: str) -> dict[str, Any]:
        return self._told(await self.get(tenant, batch_id))

    async def describe_all(self, tenant: str) -> list[dict[str, Any]]:
        """Oldest first."""
        return [self._told(one) for one in await self.all(tenant)]

    def _told(self, batch: Batch) -> dict[str, Any]:
        if (opened := self._open.get(batch.file_id)) is not None:
            batch = _counted(batch, opened)
        return {
            "id": batch.file_id,
            **{
                name: getattr(batch, name) for name in ("endpoint", "input_file_id", "status", "created_at", "metadata")
            },
            "expires_at": batch.created_at + WINDOW_SECONDS,
            **{f"{status}_at": at for status, at in batch.times.items()},
            "request_counts": {"total": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed},
            "output_file_id": batch.output_file_id if _has_ended(batch) and batch.num_completed else None,
            "error_file_id": batch.error_file_id if _has_ended(batch) and batch.num_failed else None,
            "errors": {"data": batch.errors} if batch.errors else None,
        }

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Ends the work. The answers so far stay. Raises InvalidRequestError if the batch has ended otherwise."""
        await self.get(tenant, batch_id)
        await self._whole(self._end(batch_id, "cancelled"))
        batch = await self.get(tenant, batch_id)
        if batch.status not in ("cancelled", "cancelling"):
            raise InvalidRequestError(f"is {batch.status}, so it cannot be cancelled", field="batch_id")
        return self._told(batch)

    async def next(self) -> list[str]:
        """Waits for a batch that no ingress works on. Returns its tenant and its id."""
        while not (free := [one for one in self._open.values() if not one.is_held]):
            self._freed.clear()
            await self._freed.wait()
        held = [one.tenant for one in self._open.values() if one.is_held]
        chosen = min(free, key=lambda one: held.count(one.tenant))  # else one tenant's batches could delay all others
        return [chosen.tenant, chosen.batch_id]

    async def hold(self, tenant: str, batch_id: str) -> bool:
        """An ingress waits for this while it works on the batch, which ends the wait. If the ingress is lost, so is the
        wait, and `next` offers the batch to another one. Returns False at once for a batch that another ingress works
        on, or that has ended."""
        opened = self._open.get(batch_id)
        if opened is None or opened.tenant != tenant or opened.is_held:
            return False
        opened.is_held = True
        try:
            async with asyncio.timeout(self._by_tenant[tenant][batch_id].expires_at - self._now()):
                await opened.ended.wait()
        except TimeoutError:
            await self.remove_old()
        finally:
            opened.is_held = False
            self._freed.set()
        return True

    async def outline(self, tenant: str, batch_id: str) -> bytes:
        """Returns what an ingress needs for its work, as JSON: `endpoint`, `input_file_id`, and `answered`, the ids of
        the requests that need no answer."""
        batch = await self.get(tenant, batch_id)
        answered = list(self._open[batch_id].answered) if batch_id in self._open else []
        return to_json({"endpoint": batch.endpoint, "input_file_id": batch.input_file_id, "answered": answered})

    async def begin(self, tenant: str, batch_id: str, num_total: int) -> None:
        """The batch is valid, with so many requests. May be called again."""
        await self._whole(self._begin(tenant, batch_id, num_total))

    async def add(self, tenant: str, batch_id: str, custom_id: str, is_error: bool, line: bytes) -> None:
        """Keeps the answer to a request, unless it has one already or the batch has ended. The last one completes the
        batch. Raises InvalidRequestError if there is no room for it."""
        await self._whole(self._add(tenant, batch_id, custom_id, is_error, line))

    async def fail(self, tenant: str, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """Ends the work for these errors, in OpenAI's form."""
        await self._whole(self._end(batch_id, "failed", errors))

    async def expire(self, tenant: str, file: Batch) -> None:
        known = self._by_tenant.get(tenant, {}).get(file.file_id)
        if known is None or known.expires_at > self._now():
            return  # it has ended meanwhile
        if file.file_id in self._open:
            await self._whole(self._end(file.file_id, "expired"))
        else:
            await super().expire(tenant, known)

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work to its end, also if its caller leaves: what is on disk and in memory has to agree."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        await asyncio.shield(task)

    async def _begin(self, tenant: str, batch_id: str, num_total: int) -> None:
        if (opened := self._open.get(batch_id)) is None:
            return
        async with opened.writing:
            batch = self._by_tenant[tenant][batch_id]
            if batch_id in self._open and batch.status == "validating":
                times = {**batch.times, "in_progress": int(self._now())}
                await self._change(tenant, replace(batch, status="in_progress", num_total=num_total, times=times))
        await self._end_if_done(opened)

    async def _add(self, tenant: str, batch_id: str, custom_id: str, is_error: bool, line: bytes) -> None:
        if (opened := self._open.get(batch_id)) is None:
            return
        async with opened.writing:
            if batch_id not in self._open or custom_id in opened.answered:
                return
            batch = self._by_tenant[tenant][batch_id]
            file_id = batch.error_file_id if is_error else batch.output_file_id
            await self._uploads.append(tenant, file_id, f"{file_id}.jsonl", "batch_output", line)
            opened.answered.add(custom_id)
            opened.num_failed += is_error
        await self._end_if_done(opened)

    async def _end_if_done(self, opened: _OpenBatch) -> None:
        if len(opened.answered) == self._by_tenant[opened.tenant][opened.batch_id].num_total:
            await self._end(opened.batch_id, "completed")

    async def _end(self, batch_id: str, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        if (opened := self._open.get(batch_id)) is None:
            return
        async with opened.writing:
            if self._open.pop(batch_id, None) is None:
                return  # another end came first
            tenant, now = opened.tenant, int(self._now())
            before = self._by_tenant[tenant][batch_id]
            statuses = [*([_IN_PASSING[status]] if status in _IN_PASSING else []), status]
            ended = replace(
                _counted(before, opened),
                status=status,
                times=before.times | dict.fromkeys(statuses, now),
                errors=errors or [],
                expires_at=now + int(self._max_age_s),
            )
            self._enter(tenant, replace(ended, status=statuses[0]))
            try:
                await asyncio.to_thread(self._note, tenant, ended)
            except OSError as error:  # the next shard goes on with it
                logger.warning("the end of batch %s is not on disk: %s", batch_id, error.strerror)
            for file_id in (ended.output_file_id, ended.error_file_id):
                await self._uploads.finish(tenant, file_id, ended.output_max_age_s)
            self._enter(tenant, ended)
            opened.ended.set()

    async def _change(self, tenant: str, batch: Batch) -> None:
        await asyncio.to_thread(self._note, tenant, batch)
        self._enter(tenant, batch)


def _counted(batch: Batch, opened: _OpenBatch) -> Batch:
    num_failed = opened.num_failed
    return replace(batch, num_completed=len(opened.answered) - num_failed, num_failed=num_failed)


def _has_ended(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")
