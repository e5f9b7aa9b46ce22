"""What an ingress asks of the shards: items of its requests, uploaded files, stored responses and batches."""

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from raylens.deployments.item_store.client import OnPending, ShardConnection, ShardLostError, Shards, unavailable
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, ItemTrace, SharedItem
from raylens.deployments.item_store.messages import Ask, CallMethod, Evict, Remember
from raylens.deployments.item_store.uploads import Upload
from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.stages.object_contents import IN_MESSAGE_BYTES, received, sent, stored
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS

logger = logging.getLogger(f"ray.serve.{__name__}")


class SharedItems:
    """The items of this ingress's requests. An item's hash selects its shard; if that shard is down, the next in the
    ranking takes over."""

    def __init__(self, shards: Shards, items_recomputed: Counter) -> None:
        self._shards = shards
        self._items_recomputed = items_recomputed

    async def embeddings_of(
        self, order: ItemOrder, on_pending: OnPending, pins: ExitStack
    ) -> tuple[SharedItem, ItemTrace]:
        """See `ItemMaker.embeddings_of`. The referenced data stays until `pins` is closed."""
        return await self._order(order, on_pending, pins, is_encoded=True)

    async def processed_of(self, order: ItemOrder) -> tuple[SharedItem, ItemTrace]:
        """See `ItemMaker.processed_of`. The tensors are not kept."""
        with ExitStack() as pins:
            return await self._order(order, lambda pending: None, pins, is_encoded=False)

    def evict(self, mm_hash: str, lost: PackedReference) -> None:
        self._shards.send_to_all(Evict(mm_hash, lost))

    def remember_name(self, tenant: str, name: str, hashed_content: str) -> None:
        self._shards.send(_name_key(tenant, name), Remember(tenant, name, hashed_content))

    async def find_name(self, tenant: str, name: str) -> str | None:
        for _ in range(MAX_ATTEMPTS):
            shard = await self._shards.nearest(_name_key(tenant, name))
            with suppress(ShardLostError), ExitStack() as pins:
                ask = partial(CallMethod, method="find_name", arguments=[tenant, name])
                found: str | None = await shard.ask(ask, pins)
                return found
        raise unavailable()

    async def _order(
        self, order: ItemOrder, on_pending: OnPending, pins: ExitStack, *, is_encoded: bool
    ) -> tuple[SharedItem, ItemTrace]:
        """Sends the order; sends a large content only after the shard reports it missing."""
        content = order.content
        is_large = isinstance(content, bytes) and len(content) > IN_MESSAGE_BYTES
        asked = replace(order, content=None) if is_large else order
        for _ in range(MAX_ATTEMPTS):
            shard = await self._shards.nearest(order.mm_hash)
            try:
                made: tuple[SharedItem, ItemTrace] = await shard.ask(
                    partial(Ask, is_encoded=is_encoded, order=asked), pins, on_pending
                )
                return made
            except ContentMissingError:
                if not isinstance(content, bytes):
                    raise
                kept = await stored(content)  # again, if the last copy is lost
                asked = replace(order, content=sent(kept))
            except ShardLostError as error:
                logger.warning("request %s: %s, asking again", order.request_id, error)
                self._items_recomputed.inc(stage="shared", reason="ShardLostError")
        raise unavailable()


class _OfTenants:
    """What one shard holds of a tenant, for all ingresses. Each method also raises StageUnavailableError if this shard
    is down."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def _call(self, method: str, tenant: str, *arguments: Any) -> Any:
        with ExitStack() as pins:
            return await self._ask(pins, method, tenant, *arguments)

    async def _read(self, method: str, tenant: str, *arguments: Any) -> bytes:
        with ExitStack() as pins:
            return await received(await self._ask(pins, method, tenant, *arguments))

    async def _ask(self, pins: ExitStack, method: str, tenant: str, *arguments: Any) -> Any:
        return await self._ask_shard(await self._shards.owner(tenant), pins, method, tenant, *arguments)

    async def _ask_shard(self, shard: ShardConnection, pins: ExitStack, method: str, *arguments: Any) -> Any:
        try:
            return await shard.ask(partial(CallMethod, method=method, arguments=list(arguments)), pins)
        except ShardLostError as error:
            raise unavailable() from error


class SharedUploads(_OfTenants):
    """See `Uploads`."""

    async def add(
        self, tenant: str, filename: str, purpose: str, content: bytes, *, max_age_s: float | None = None
    ) -> Upload:
        kept = await stored(content)
        added: Upload = await self._call("add_file", tenant, filename, purpose, sent(kept), max_age_s)
        return added

    async def all(self, tenant: str) -> list[Upload]:
        uploads: list[Upload] = await self._call("files", tenant)
        return uploads

    async def get(self, tenant: str, file_id: str) -> Upload:
        upload: Upload = await self._call("file", tenant, file_id)
        return upload

    async def read(self, tenant: str, file_id: str) -> bytes:
        return await self._read("read_file", tenant, file_id)

    async def delete(self, tenant: str, file_id: str) -> None:
        await self._call("delete_file", tenant, file_id)


class SharedResponses(_OfTenants):
    """See `StoredResponses` and `ResponsesInWork`."""

    async def store(self, tenant: str, response_id: str, previous_id: str, content: bytes) -> None:
        kept = await stored(content)
        await self._call("store_response", tenant, response_id, previous_id, sent(kept))

    async def read(self, tenant: str, response_id: str) -> bytes:
        return await self._read("read_response", tenant, response_id)

    async def conversation(self, tenant: str, response_id: str, max_bytes: int) -> bytes:
        return await self._read("read_conversation", tenant, response_id, max_bytes)

    async def delete(self, tenant: str, response_id: str) -> None:
        await self._call("delete_response", tenant, response_id)

    async def until_cancelled(self, tenant: str, response_id: str) -> None:
        await self._call("until_cancelled", tenant, response_id)

    async def cancel(self, tenant: str, response_id: str) -> None:
        await self._call("cancel_response", tenant, response_id)

    async def is_in_work(self, tenant: str, response_id: str) -> bool:
        is_in_work: bool = await self._call("is_in_work", tenant, response_id)
        return is_in_work


class SharedBatches(_OfTenants):
    """See `Batches`."""

    async def create(self, tenant: str, *fields: Any) -> dict[str, Any]:
        created: dict[str, Any] = await self._call("create_batch", tenant, *fields)
        return created

    async def get(self, tenant: str, batch_id: str) -> dict[str, Any]:
        batch: dict[str, Any] = await self._call("batch", tenant, batch_id)
        return batch

    async def all(self, tenant: str) -> list[dict[str, Any]]:
        batches: list[dict[str, Any]] = await self._call("batches", tenant)
        return batches

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        cancelled: dict[str, Any] = await self._call("cancel_batch", tenant, batch_id)
        return cancelled

    @property
    def shards(self) -> list[str]:
        return self._shards.names

    async def next(self, shard: str) -> tuple[str, str]:
        """Returns the tenant and the id of a batch at this shard."""
        with ExitStack() as pins:
            tenant, batch_id = await self._ask_shard(await self._shards.shard(shard), pins, "next_batch")
            return tenant, batch_id

    async def hold(self, tenant: str, batch_id: str) -> bool:
        is_mine: bool = await self._call("hold_batch", tenant, batch_id)
        return is_mine

    async def outline(self, tenant: str, batch_id: str) -> bytes:
        return await self._read("outline_batch", tenant, batch_id)

    async def begin(self, tenant: str, batch_id: str, num_total: int) -> None:
        await self._call("begin_batch", tenant, batch_id, num_total)

    async def add(self, tenant: str, batch_id: str, custom_id: str, is_error: bool, line: bytes) -> None:
        kept = await stored(line)
        await self._call("add_answer", tenant, batch_id, custom_id, is_error, sent(kept))

    async def fail(self, tenant: str, batch_id: str, errors: list[dict[str, Any]]) -> None:
        await self._call("fail_batch", tenant, batch_id, errors)


def _name_key(tenant: str, name: str) -> str:
    return f"{tenant}\0{name}"
