"""Uploaded files, reachable from any ingress: one shard holds all files of a tenant."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from raylens.deployments.item_store.client import ShardLostError, Shards, unavailable
from raylens.deployments.item_store.messages import CallMethod
from raylens.deployments.item_store.uploads import Upload
from raylens.deployments.stages.object_contents import received, sent


class SharedUploads:
    """See `Uploads`. Each method also raises StageUnavailableError if the tenant's shard is down."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        added: Upload = await self._call("add_file", tenant, filename, purpose, await sent(content), max_age_s)
        return added

    async def all(self, tenant: str) -> list[Upload]:
        uploads: list[Upload] = await self._call("files", tenant)
        return uploads

    async def get(self, tenant: str, file_id: str) -> Upload:
        upload: Upload = await self._call("file", tenant, file_id)
        return upload

    async def read(self, tenant: str, file_id: str) -> bytes:
        with ExitStack() as pins:
            return await received(await self._ask(pins, "read_file", tenant, file_id))

    async def delete(self, tenant: str, file_id: str) -> None:
        await self._call("delete_file", tenant, file_id)

    async def _call(self, method: str, tenant: str, *arguments: Any) -> Any:
        with ExitStack() as pins:
            return await self._ask(pins, method, tenant, *arguments)

    async def _ask(self, pins: ExitStack, method: str, tenant: str, *arguments: Any) -> Any:
        shard = await self._shards.owner(tenant)
        try:
            return await shard.ask(partial(CallMethod, method=method, arguments=[tenant, *arguments]), pins)
        except ShardLostError as error:
            raise unavailable() from error
