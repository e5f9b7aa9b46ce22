"""Gets the items of this ingress's requests from the shared shards."""

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from ray import ObjectRef

from raylens.deployments.item_store.client import ShardLostError, Shards, unavailable
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, MadeItem, OnPending
from raylens.deployments.item_store.messages import Ask, CallMethod, Evict, Remember
from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.stages.object_contents import IN_MESSAGE_BYTES, sent
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS

logger = logging.getLogger(f"ray.serve.{__name__}")


class ItemSource(Protocol):
    """Source of a request's items."""

    async def embeddings_of(self, order: ItemOrder, on_pending: OnPending, pins: ExitStack) -> MadeItem:
        """See `ItemMaker.embeddings_of`. The referenced data stays until `pins` is closed."""

    async def processed_of(self, order: ItemOrder) -> MadeItem:
        """See `ItemMaker.processed_of`. The tensors are not kept."""

    def evict(self, mm_hash: str, lost: ObjectRef) -> None:
        """See `ItemMaker.evict`."""

    def remember_name(self, tenant: str, name: str, hashed_content: str) -> None:
        """See `NamedContents.remember`."""

    async def find_name(self, tenant: str, name: str) -> str | None:
        """See `NamedContents.find`."""


class SharedItems:
    """An ItemSource. An item's hash selects its shard; if that shard is down, the next in the ranking takes over."""

    def __init__(self, shards: Shards, items_recomputed: Counter) -> None:
        self._shards = shards
        self._items_recomputed = items_recomputed

    async def embeddings_of(self, order: ItemOrder, on_pending: OnPending, pins: ExitStack) -> MadeItem:
        return await self._order(order, on_pending, pins, is_encoded=True)

    async def processed_of(self, order: ItemOrder) -> MadeItem:
        with ExitStack() as pins:
            return await self._order(order, lambda pending: None, pins, is_encoded=False)

    def evict(self, mm_hash: str, lost: ObjectRef) -> None:
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

    async def _order(self, order: ItemOrder, on_pending: OnPending, pins: ExitStack, *, is_encoded: bool) -> MadeItem:
        """Sends the order; sends a large content only after the shard reports it missing."""
        content = order.content
        is_large = isinstance(content, bytes) and len(content) > IN_MESSAGE_BYTES
        asked = replace(order, content=None) if is_large else order
        for _ in range(MAX_ATTEMPTS):
            shard = await self._shards.nearest(order.mm_hash)
            try:
                made: MadeItem = await shard.ask(partial(Ask, is_encoded=is_encoded, order=asked), pins, on_pending)
                return made
            except ContentMissingError:
                if not isinstance(content, bytes):
                    raise
                asked = replace(order, content=await sent(content))
            except ShardLostError as error:
                logger.warning("request %s: %s, asking again", order.request_id, error)
                self._items_recomputed.inc(stage="shared", reason="ShardLostError")
        raise unavailable()


def _name_key(tenant: str, name: str) -> str:
    return f"{tenant}\0{name}"
