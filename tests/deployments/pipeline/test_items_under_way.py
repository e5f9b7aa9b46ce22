"""The items of a request on their way to embeddings, made by a stand-in."""

import asyncio
import copy
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from raylens.deployments.item_store.item_states import OnPending, PendingItem, StoredItem
from raylens.deployments.pipeline.items_under_way import ItemsUnderWay
from raylens.deployments.pipeline.media_items import LoadedItem
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import ItemExpansion, ItemInfo, PlaceholderRange
from tests.deployments.pipeline.stand_in_stages import Reference, request, stage_error
from tests.waiting import until


class Media:
    """Processes each item as soon as it is asked for it, encodes it once `may_start` is set, and has made it once
    `may_end` is set."""

    def __init__(self) -> None:
        self.may_start, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.failure: Exception | None = None
        self.info: Reference | ItemInfo | None = None
        self.replacement: Any = None
        self.num_asked = 0
        self.num_cancelled = 0
        self.forgotten: list[tuple[str, Any]] = []
        self.given_back: list[str] = []

    async def embeddings_of(
        self, request: object, item: LoadedItem, on_pending: OnPending, pins: ExitStack
    ) -> StoredItem:
        self.num_asked += 1
        pins.callback(self.given_back.append, item.mm_hash)
        made = stored(f"{item.mm_hash} of call {self.num_asked}")
        info: Any = self.info if self.info is not None else made.info
        on_pending(PendingItem(info, None))
        await self.may_start.wait()
        on_pending(PendingItem(copy.deepcopy(info) if isinstance(info, ItemInfo) else info, made.ref))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return made if self.replacement is None else stored(self.replacement)

    def evict(self, item: LoadedItem, lost: Any) -> None:
        self.forgotten.append((item.mm_hash, lost))


def stored(ref: Any) -> StoredItem:
    info: Any = f"info of {ref}"
    return StoredItem(info, ref)


def under_way(media: Any, num_items: int = 2) -> ItemsUnderWay:
    items = [LoadedItem(MediaSource(None, "f"), None, 0, "", f"item {index}") for index in range(num_items)]
    return ItemsUnderWay(media, request(num_items), items)


def handed(items: ItemsUnderWay) -> list[tuple[Any, bool]]:
    return [(item.ref, item.is_pending) for item in items.hand_over()]


async def test_an_item_is_pending_until_its_embeddings_are_there() -> None:
    media = Media()
    async with under_way(media) as items:
        await items.started()
        assert handed(items) == [("item 0 of call 1", True), ("item 1 of call 2", True)]
        media.may_end.set()
        await items.meanwhile(asyncio.sleep(0.01))
        assert handed(items) == [("item 0 of call 1", False), ("item 1 of call 2", False)]


async def test_what_is_known_of_items_is_there_before_they_start() -> None:
    media = Media()
    media.may_start.clear()
    async with under_way(media) as items:
        infos = await asyncio.wait_for(items.with_infos(given), 5)
        assert infos == ["info of item 0 of call 1", "info of item 1 of call 2"]
        starting = asyncio.create_task(items.started())
        await asyncio.sleep(0.01)
        assert not starting.done()
        media.may_start.set()
        await starting


async def given(infos: Any) -> Any:
    return infos


async def test_a_call_gets_references_to_what_is_not_known_yet_and_is_made_once() -> None:
    media = Media()
    media.info = Reference()
    calls: list[Any] = []

    async def call(infos: Any) -> list[str]:
        calls.append(infos)
        return [await info for info in infos]

    async with under_way(media) as items:
        waiting = asyncio.create_task(items.with_infos(call))
        await until(lambda: bool(calls))
        media.may_end.set()  # the embeddings come before the call has read the metadata
        await items.meanwhile(asyncio.sleep(0.01))
        media.info.object.set_result("info")
        assert await asyncio.wait_for(waiting, 5) == ["info", "info"]
    assert calls == [[media.info, media.info]]


async def test_a_call_with_metadata_that_is_announced_once_more_is_made_once() -> None:
    media = Media()
    media.info = ItemInfo("image", ItemExpansion(np.zeros(2, np.int32), PlaceholderRange(0, 2)), 10)
    media.may_start.clear()
    calls: list[Any] = []

    async def call(infos: Any) -> int:
        calls.append(infos)
        await media.may_end.wait()
        return len(infos)

    async with under_way(media) as items:
        waiting = asyncio.create_task(items.with_infos(call))
        await until(lambda: bool(calls))
        media.may_start.set()
        await items.started()
        media.may_end.set()
        assert await asyncio.wait_for(waiting, 5) == 2
    assert len(calls) == 1


async def test_an_item_that_fails_goes_before_the_failure_of_a_call_that_needs_it() -> None:
    media = Media()
    media.info = Reference()
    media.info.fail(stage_error(ValueError("of nobody's item")))
    media.failure = ValueError("my item")

    async def call(infos: Any) -> None:
        await infos[0]

    async with under_way(media) as items:
        waiting = asyncio.create_task(items.with_infos(call))
        await asyncio.sleep(0.01)
        media.may_end.set()
        with pytest.raises(ValueError, match="my item"):
            await asyncio.wait_for(waiting, 5)


async def test_what_another_replica_makes_already_is_waited_for_and_not_made_again() -> None:
    media = Media()
    async with under_way(media) as items:
        await items.started()
        items.hand_over()
        media.replacement = "of another replica"
        again = asyncio.create_task(items.make_lost_again())
        await asyncio.sleep(0.01)
        assert not again.done()
        media.may_end.set()
        await again
        assert (media.num_asked, media.forgotten) == (2, [])


async def test_what_was_there_is_forgotten_and_made_again() -> None:
    media = Media()
    media.may_end.set()
    async with under_way(media) as items:
        await items.meanwhile(asyncio.sleep(0.01))
        items.hand_over()
        await items.make_lost_again()
        assert media.forgotten == [("item 0", "item 0 of call 1"), ("item 1", "item 1 of call 2")]
        assert handed(items) == [("item 0 of call 3", False), ("item 1 of call 4", False)]


async def test_an_item_that_fails_ends_what_is_done_meanwhile() -> None:
    media = Media()
    async with under_way(media) as items:
        media.failure = ValueError("broken")
        work = asyncio.ensure_future(asyncio.sleep(60))
        task = asyncio.create_task(items.meanwhile(work))
        await asyncio.sleep(0)
        media.may_end.set()
        with pytest.raises(ValueError, match="broken"):
            await asyncio.wait_for(task, 5)
        assert work.cancelled()


async def test_whatever_is_still_made_at_the_end_is_cancelled() -> None:
    media = Media()
    async with under_way(media):
        await until(lambda: media.num_asked == 2)
    assert media.num_cancelled == 2


async def test_items_are_given_back_when_nobody_needs_them_any_more() -> None:
    media = Media()
    media.may_end.set()
    async with under_way(media) as items:
        await items.meanwhile(asyncio.sleep(0.01))
        items.hand_over()
        await items.make_lost_again()
        assert media.given_back == []
    assert sorted(media.given_back) == ["item 0", "item 0", "item 1", "item 1"]
