"""Which stages make an item: those of the model that its order names."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raylens.deployments.config import SharedConfig
from raylens.deployments.item_store.item_maker import ItemMaker
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, ItemTrace, MadeItem, StoredItem
from raylens.deployments.metrics.definitions import ItemMetrics
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.stage_calls import StageCalls, StageHandles, StageUnavailableError
from raylens.deployments.tracing.spans import Spans
from raylens.preprocess.schema import InvalidRequestError, StageTime
from tests.deployments.pipeline.stand_in_stages import Fate, StandInStages, lost, packed, stage_error
from tests.virtual_time import in_virtual_time

SUFFIXES = ("", "-second")


class CalledError(Exception):
    """Names the stage that was called."""


def stage(name: str) -> Any:
    def call(*_: object) -> None:
        raise CalledError(name)

    return SimpleNamespace(process_item=SimpleNamespace(remote=call))


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


async def origins_of(*orders: ItemOrder) -> list[str]:
    """Where the item of each order comes from, of orders that come together."""
    nothing: Any = None
    maker = Maker(SharedConfig(embedding_cache_bytes=0), {}, nothing, ItemMetrics(), Spans())
    made = await asyncio.gather(*(maker.embeddings_of(one, lambda _: None) for one in orders), return_exceptions=True)
    return ["" if isinstance(one, BaseException) else one.trace.origin for one in made]


def named(request_id: str, *, content: bytes | None = b"content") -> ItemOrder:
    return replace(order(""), context=RequestContext(request_id), content=content)


async def test_who_joins_another_s_work_is_told_whose_it_is() -> None:
    assert await origins_of(named("a"), named("b"), named("c")) == [""] + ["made for request a"] * 2


async def test_who_does_the_work_after_another_s_failure_did_it_itself() -> None:
    assert await origins_of(named("a", content=None), named("b")) == ["", ""]


async def test_who_joins_work_after_another_s_failure_is_told_whose_it_is() -> None:
    nothing: Any = None
    maker = Maker(SharedConfig(embedding_cache_bytes=0), {}, nothing, ItemMetrics(), Spans())
    first = asyncio.ensure_future(maker.embeddings_of(named("a", content=None), lambda _: None))
    second = asyncio.ensure_future(maker.embeddings_of(named("b"), lambda _: None))
    with pytest.raises(ContentMissingError):
        await first
    third = await maker.embeddings_of(named("c"), lambda _: None)
    assert [one.trace.origin for one in (await second, third)] == ["", "made for request b"]


def test_only_the_lost_embeddings_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedReference, "of", packed)
    made, (old, new) = maker(), list[Any](["old", "new"])
    nothing: Any = None
    made.embeddings._keep("hash", StoredItem(nothing, new), 1)
    made.evict("hash", old)
    assert made.embeddings.peek("hash") is not None, "it was made again since"
    made.evict("hash", new)
    assert made.embeddings.peek("hash") is None


@dataclass(frozen=True)
class Client:
    """Orders the same item as the others. Times are in turns of the event loop."""

    comes: int
    has_content: bool
    wants_embeddings: bool = True
    leaves_after: int | None = None


CLIENTS = st.builds(
    Client, st.integers(0, 12), st.booleans(), st.booleans(), st.one_of(st.none(), st.none(), st.integers(0, 12))
)
REFUSED = stage_error(InvalidRequestError("no picture", field="messages[0]"))
LOST = lost()
LOSSES: list[Fate] = ["lost later", LOST]
FATES = st.lists(st.sampled_from(["works", "dies before", "dies between", *LOSSES, REFUSED]), max_size=4)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def served(maker: ItemMaker, client: Client) -> MadeItem:
    await turns(client.comes)
    content = b"content" if client.has_content else None
    sent = replace(order(""), content=content)
    work = maker.embeddings_of(sent, lambda _: None) if client.wants_embeddings else maker.processed_of(sent)
    task = asyncio.ensure_future(work)
    if client.leaves_after is not None:
        await turns(client.leaves_after)
        task.cancel()
    return await task


def bounded(maker: ItemMaker, limit: int) -> None:
    """Ends the test where a cache is asked more often: a caller that spins would let nothing else run."""
    for cache in (maker.processed, maker.embeddings):
        asked, original = 0, cache.get_or_create

        async def get_or_create(*arguments: Any, original: Any = original) -> Any:
            nonlocal asked
            asked += 1
            assert asked <= limit, "an order spins"
            return await original(*arguments)

        cache.get_or_create = get_or_create  # type: ignore[method-assign, assignment]


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.lists(CLIENTS, min_size=1, max_size=8), FATES, FATES)
@example([Client(0, False), Client(2, True)], [], [])
@example([Client(0, False, False), Client(1, True, False)], [], [])
def test_every_order_ends_in_few_turns(clients: Sequence[Client], preprocess: list[Fate], encode: list[Fate]) -> None:
    @in_virtual_time
    async def run() -> None:
        maker = StandInStages(preprocess=preprocess, encode=encode).maker()
        bounded(maker, limit=8 * (len(clients) + len(preprocess) + len(encode)))
        results = await asyncio.wait_for(
            asyncio.gather(*(served(maker, client) for client in clients), return_exceptions=True), 60
        )
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                assert client.leaves_after is not None
            elif isinstance(result, ContentMissingError):
                assert not client.has_content or any(fate in preprocess + encode for fate in LOSSES), result
            elif isinstance(result, BaseException):
                assert isinstance(result, StageUnavailableError | InvalidRequestError), result
        await turns(10)
        assert (maker.processed.num_pending, maker.embeddings.num_pending) == (0, 0)
        assert not maker._contents

    run()
