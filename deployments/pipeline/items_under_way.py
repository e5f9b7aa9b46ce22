"""Makes the embeddings of one request's items, while the pipeline does other work."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Self, TypeVar

from ray import ObjectRef

from raylens.deployments.item_store.item_states import PendingItem, StoredItem
from raylens.deployments.pipeline.media_items import LoadedItem, MediaItems, all_or_none
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.stages.hand_over import ItemEmbeddings
from raylens.deployments.stages.stage_calls import with_pending
from raylens.preprocess.schema import ItemInfo

_SETTLE_SECONDS = 0.5

ResultT = TypeVar("ResultT")
Infos = list[ItemInfo | ObjectRef]
"""The metadata of a request's items. A reference may still be pending."""


class _Item:
    """One item's state. `is_known`: Preprocess works on it. `has_started`: its embeddings are ready, or Encode makes
    them."""

    def __init__(self) -> None:
        self.is_known, self.has_started = asyncio.Event(), asyncio.Event()
        self.info: ItemInfo | ObjectRef | None = None
        self.ref: ObjectRef | None = None
        self.is_pending = True

    def note(self, pending: PendingItem) -> None:
        if not isinstance(self.info, ItemInfo):  # metadata never changes, even if announced again
            self.info = pending.info
        self.is_known.set()
        if pending.ref is not None:  # else Preprocess works on it; an earlier reference stays
            self.ref = pending.ref
            self.has_started.set()

    async def run(self, embeddings: Awaitable[StoredItem]) -> None:
        stored = await embeddings
        self.is_pending = False
        # A pending reference to the metadata stays, because `with_pending` compares references.
        self.note(PendingItem(stored.info if self.info is None else self.info, stored.ref))


class ItemsUnderWay:
    """A context manager. Entering it starts to make all items. Leaving it cancels the unfinished items and releases the
    finished ones."""

    _all: asyncio.Task[list[None]]

    def __init__(self, media: MediaItems, request: PipelineRequest, items: list[LoadedItem]) -> None:
        self._media = media
        self.request = request
        self.loaded = items
        self._items: list[_Item] = []
        self._handed_over: list[ItemEmbeddings] = []
        self._pins = ExitStack()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._all.cancel()
        await asyncio.wait([self._all])
        if not self._all.cancelled():
            self._all.exception()  # retrieved, or asyncio logs it
        self._pins.close()

    async def with_infos(self, call: Callable[[Infos], Awaitable[ResultT]]) -> ResultT:
        """Returns `call(infos)` with the metadata of all items, or references to it while Preprocess works on them.
        Raises the failure of the first item that fails."""
        return await with_pending(self._infos, self._processed, call)

    async def processed_infos(self) -> list[ItemInfo] | None:
        """Waits until every item is known. Returns the metadata of all items, or None while Preprocess works on one.
        Raises the failure of the first item that fails."""
        infos = await self.meanwhile(self._infos())
        processed = [info for info in infos if isinstance(info, ItemInfo)]
        return processed if len(processed) == len(infos) else None

    async def started(self) -> None:
        """Waits until all embeddings are ready or Encode makes them."""
        await self.meanwhile(_wait_for(item.has_started for item in self._items))

    def hand_over(self) -> list[ItemEmbeddings]:
        """Returns references to all items' embeddings for a call of Generate. Call it after `started`."""
        self._handed_over = [ItemEmbeddings(item.ref, item.is_pending) for item in self._items if item.ref is not None]
        return self._handed_over

    async def make_lost_again(self) -> None:
        """Restores embeddings that a call of Generate lost. Returns once all are ready.

        If a replica died, another one has already replaced its item's reference. If no item has a new reference, the
        node with the data is gone: evict all items and recompute them."""
        await self._finished()
        if [item.ref for item in self._items] == [item.ref for item in self._handed_over]:
            for loaded, item in zip(self.loaded, self._items, strict=True):
                if item.ref is not None:
                    self._media.evict(loaded, item.ref)
            self._start()
            await self._finished()

    async def settled(self) -> None:
        """Waits briefly for the shards to report items that Generate already has. Without it these items would be
        cancelled as unneeded, and their times would be missing."""
        await asyncio.wait([self._all], timeout=_SETTLE_SECONDS)

    async def meanwhile(self, work: Awaitable[ResultT]) -> ResultT:
        """Returns the result of `work`. Raises an item's failure at once."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._all], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._finished()
            return await task
        finally:
            # Wait for its end: it may be a step of a generator that the caller closes next.
            task.cancel()
            await asyncio.wait([task])

    async def _infos(self) -> Infos:
        """Waits until Preprocess works on every item."""
        await _wait_for(item.is_known for item in self._items)
        return [item.info for item in self._items if item.info is not None]

    async def _processed(self) -> None:
        """Waits until every item is processed."""
        try:
            for info in await self._infos():
                if not isinstance(info, ItemInfo):
                    await info
        except Exception:
            await self._finished()  # raises, unless another replica made the item

    def _start(self) -> None:
        self._items = [_Item() for _ in self.loaded]
        work = [
            item.run(self._media.embeddings_of(self.request, loaded, item.note, self._pins))
            for item, loaded in zip(self._items, self.loaded, strict=True)
        ]
        self._all = asyncio.create_task(all_or_none(work))

    async def _finished(self) -> None:
        """Waits until all embeddings are ready. Raises the failure of the first item that fails."""
        await asyncio.shield(self._all)


async def _wait_for(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
