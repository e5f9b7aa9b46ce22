"""Which stages make an item: those of the model that its order names."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import SharedConfig
from deployments.metrics.definitions import ItemMetrics
from deployments.request_context import RequestContext
from deployments.shared.item_maker import ItemMaker
from deployments.shared.item_states import ContentMissingError, ItemOrder, ItemTrace, StoredItem
from deployments.shared.stage_calls import StageCalls, StageUnavailableError
from deployments.stages.stage_handles import StageHandles
from deployments.tracing.spans import Spans
from preprocess.schema import StageTime

SUFFIXES = ("", "-second")


class CalledError(Exception):
    """Names the stage that was called."""


def stage(name: str) -> Any:
    def call(*_: object) -> None:
        raise CalledError(name)

    methods = SimpleNamespace(process_item=SimpleNamespace(remote=call))
    return SimpleNamespace(options=lambda **_: methods)


def maker() -> ItemMaker:
    nothing: Any = None
    stages = {suffix: StageHandles(stage(f"Preprocess{suffix}"), nothing, {}) for suffix in SUFFIXES}
    return ItemMaker(SharedConfig(), stages, StageCalls(nothing), ItemMetrics(), Spans())


def order(model: str) -> ItemOrder:
    return ItemOrder(RequestContext("r"), "r", model, f"hash of {model}", "image", b"content", 1, 1, {}, False)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_model_s_own_stages_make_its_items(suffix: str) -> None:
    with pytest.raises(CalledError, match=f"Preprocess{suffix}$"):
        asyncio.run(maker().processed_of(order(suffix)))


def test_a_model_that_the_shard_has_not_heard_of_is_not_available() -> None:
    with pytest.raises(StageUnavailableError, match="the preprocess stage is not available"):
        asyncio.run(maker().processed_of(order("-third")))


class Maker(ItemMaker):
    """Makes embeddings at once, of what has content."""

    async def _make(self, order: ItemOrder, trace: ItemTrace, announce: object) -> tuple[StoredItem, int]:
        await asyncio.sleep(0.01)
        if order.content is None:
            raise ContentMissingError
        trace.times.append(StageTime("encode", 1.0, 0.5))
        nothing: Any = None
        return StoredItem(nothing, nothing), 1


async def details_of(*orders: ItemOrder) -> list[str]:
    """What the time of the whole says of each order's item, of orders that come together."""
    nothing: Any = None
    maker = Maker(SharedConfig(embedding_cache_bytes=0), {}, nothing, ItemMetrics(), Spans())
    made = await asyncio.gather(*(maker.embeddings_of(one, lambda _: None) for one in orders), return_exceptions=True)
    return ["" if isinstance(one, BaseException) else one.trace.times[-1].detail for one in made]


def named(request_id: str, *, content: bytes | None = b"content") -> ItemOrder:
    return replace(order(""), context=RequestContext(request_id), content=content)


async def test_who_joins_another_s_work_is_told_whose_it_is() -> None:
    assert await details_of(named("a"), named("b"), named("c")) == [""] + ["made for request a"] * 2


async def test_who_does_the_work_after_another_s_failure_did_it_itself() -> None:
    assert await details_of(named("a", content=None), named("b")) == ["", ""]
