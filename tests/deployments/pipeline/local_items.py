"""The items of one process, without connections: for tests of what asks for items, and of what makes them."""

from contextlib import ExitStack

from raylens.deployments.item_store.client import OnPending
from raylens.deployments.item_store.item_maker import ItemMaker
from raylens.deployments.item_store.item_states import ItemOrder, ItemTrace, SharedItem
from raylens.deployments.item_store.shared_items import SharedItems
from raylens.deployments.item_store.store import NamedContents
from raylens.deployments.ray_internals.references import PackedReference


class LocalItems(SharedItems):
    """The same methods, on an ItemMaker of this process."""

    def __init__(self, maker: ItemMaker) -> None:
        self.maker = maker
        self.names = NamedContents(100)

    async def embeddings_of(
        self, order: ItemOrder, on_pending: OnPending, pins: ExitStack
    ) -> tuple[SharedItem, ItemTrace]:
        made = await self.maker.embeddings_of(order, lambda pending: on_pending(pending.shared))
        return made.stored.shared, made.trace

    async def processed_of(self, order: ItemOrder) -> tuple[SharedItem, ItemTrace]:
        made = await self.maker.processed_of(order)
        return made.stored.shared, made.trace

    def evict(self, mm_hash: str, lost: PackedReference) -> None:
        self.maker.evict(mm_hash, lost)

    def remember_name(self, tenant: str, name: str, hashed_content: str) -> None:
        self.names.remember(tenant, name, hashed_content)

    async def find_name(self, tenant: str, name: str) -> str | None:
        return self.names.find(tenant, name)
