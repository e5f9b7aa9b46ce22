"""Items of concurrent requests: each is made once, and no request spoils another's. Stages are stand-ins here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import ObjectRef

from raylens.deployments.config import MediaConfig, SharedConfig
from raylens.deployments.item_store.item_maker import ItemMaker, OnTaken
from raylens.deployments.item_store.item_states import ItemOrder, ItemTrace, StoredItem
from raylens.deployments.metrics.definitions import IngressMetrics, ItemMetrics
from raylens.deployments.pipeline.media_items import MediaItems
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.stages.stage_calls import StageHandles
from raylens.deployments.tracing.spans import Spans
from raylens.deployments.wire.stage_messages import EmbeddingInfo
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.data_url import data_url
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import (
    ChatPrompt,
    InvalidRequestError,
    ItemExpansion,
    ItemInfo,
    PlaceholderRange,
    ProcessorIdentity,
)
from tests.deployments.pipeline.local_items import LocalItems
from tests.pictures import disc, encoded

RED, BLUE = (data_url(encoded(disc(colour))) for colour in ("red", "blue"))
PROCESSOR = ProcessorIdentity("fingerprint")


def info(num_bytes: int = 10, is_encoded: bool = False) -> ItemInfo:
    expansion = ItemExpansion(np.zeros(1, np.int32), PlaceholderRange(0, 1))
    return ItemInfo("image", expansion, num_bytes, is_encoded=is_encoded)


class Maker(ItemMaker):
    """With stages that answer at once, or when `may_go_on` is set."""

    def __init__(self, **settings: Any) -> None:
        nothing: Any = None
        preprocess: Any = SimpleNamespace(process_item=None)
        stages = {"": StageHandles(preprocess, nothing, {})}
        super().__init__(SharedConfig.model_validate(settings), stages, nothing, ItemMetrics(), Spans())
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.made: list[str] = []

    async def _process(self, order: ItemOrder, trace: ItemTrace, on_taken: OnTaken) -> tuple[StoredItem, int]:
        if not self._contents.get(order.mm_hash):
            return await super()._process(order, trace, on_taken)
        self.made.append(order.request_id)
        found: Any = f"tensors of {order.mm_hash}"
        return StoredItem(info(is_encoded=order.is_precomputed), found), 10

    async def _encode(
        self, order: ItemOrder, trace: ItemTrace, tensors: ObjectRef, on_taken: OnTaken
    ) -> tuple[ObjectRef, EmbeddingInfo]:
        found: Any = f"embeddings of {order.mm_hash}"
        on_taken(found)
        await self.may_go_on.wait()
        return found, EmbeddingInfo(10, 0.0, 0.0, 0.0)


class Items(MediaItems):
    """The items of one ingress, from a maker in its own process."""

    def __init__(self, *, model: str = "", maker: Maker | None = None, **settings: Any) -> None:
        nothing: Any = None
        self.maker = maker or Maker(**settings)
        super().__init__(MediaConfig(), LocalItems(self.maker), IngressMetrics(), nothing, on_reply=ignore, model=model)


@pytest.fixture
async def items(request: pytest.FixtureRequest) -> AsyncIterator[Items]:
    """Its parameter: settings of the items."""
    made = Items(**getattr(request, "param", {}))
    yield made
    await made.close()


def request(url: str | None, uuid: str | None = None, name: str = "r") -> PipelineRequest:
    source = MediaSource(url, f"field of {name}", uuid=uuid)
    return PipelineRequest(name, ChatPrompt([]), [source], SamplingParams())


async def embeddings(items: Items, sent: PipelineRequest) -> Any:
    (item,) = await items.load(sent, PROCESSOR)
    return (await items.embeddings_of(sent, item, ignore, ExitStack())).ref


def ignore(known: object) -> None:
    pass


async def test_one_item_of_many_requests_is_made_once(items: Items) -> None:
    found = await asyncio.gather(*(embeddings(items, request(RED, name=str(number))) for number in range(5)))
    assert len(set(found)) == len(items.maker.made) == 1


async def test_models_with_one_processor_share_no_embeddings(items: Items) -> None:
    """Their vision halves may differ."""
    other = Items(model="-other", maker=items.maker)
    first, second, again = [await embeddings(one, request(RED)) for one in (items, other, items)]
    assert first == again != second
    assert len(items.maker.made) == 2
    (loaded,) = await other.load(request(RED), PROCESSOR)
    assert loaded.order_of(request(RED)).model == "-other"
    await other.close()


@pytest.mark.parametrize("items", [{"embedding_cache_bytes": 0}], indirect=True)
async def test_a_name_that_is_sent_anew_stays_with_the_new_content(items: Items) -> None:
    """Also when a request that only named the old content ends later."""
    old = await embeddings(items, request(RED, "mine"))
    items.maker.may_go_on.clear()
    late = asyncio.create_task(embeddings(items, request(None, "mine")))
    await asyncio.sleep(0.01)
    newer = asyncio.create_task(embeddings(items, request(BLUE, "mine")))
    await asyncio.sleep(0.01)
    items.maker.may_go_on.set()
    new = await newer
    assert await late == old != new
    assert await embeddings(items, request(None, "mine")) == new


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_request_with_content_does_not_fail_with_one_that_only_has_its_name(
    items: Items, num_turns: int
) -> None:
    old = await embeddings(items, request(RED, "mine"))
    (named,) = await items.load(request(None, "mine"), PROCESSOR)
    items.evict(named, old)  # evicted meanwhile
    only_named = asyncio.ensure_future(items.embeddings_of(request(None, "mine", "first"), named, ignore, ExitStack()))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    found = await embeddings(items, request(RED, "mine", "second"))
    assert str(found).startswith("embeddings of")
    (outcome,) = list[Any](await asyncio.gather(only_named, return_exceptions=True))
    if isinstance(outcome, InvalidRequestError):
        assert outcome.code == "media_not_cached"
    else:
        assert outcome.ref == found, "it has used the other's content"


@pytest.mark.parametrize("items", [{"embedding_cache_bytes": 25}], indirect=True)
async def test_what_clients_encoded_counts_in_the_cache(items: Items) -> None:
    for number in range(4):
        url = data_url(encoded(disc("red", (100 + number, 100))))
        source = MediaSource(url, "f", is_precomputed=True)
        await embeddings(items, PipelineRequest("r", ChatPrompt([]), [source], SamplingParams()))
    assert (items.maker.embeddings.stats.num_bytes, items.maker.embeddings.stats.evictions) == (20, 2)


async def test_whoever_waits_for_an_item_knows_it_while_it_is_encoded(items: Items) -> None:
    (item,) = await items.load(request(RED), PROCESSOR)
    items.maker.may_go_on.clear()
    known: list[Any] = []
    tasks = [asyncio.create_task(items.embeddings_of(request(RED), item, known.append, ExitStack())) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert [one.ref for one in known] == [f"embeddings of {item.mm_hash}"] * 2
    items.maker.may_go_on.set()
    assert [(await task).ref for task in tasks] == [one.ref for one in known]


async def test_a_header_is_read_once_and_the_pixels_go_with_the_item(
    items: Items, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = encoded(disc("red", (30, 20)))

    async def read(cache_salt: str, file_id: str) -> bytes:
        return picture

    monkeypatch.setattr(items, "_uploads", SimpleNamespace(read=read))
    fetched: list[tuple[int, ...]] = []
    sources = [
        MediaSource("upload:a", "f"),
        MediaSource("upload:b", "f", is_precomputed=True),
        MediaSource(RED, "f", num_pixels=7),  # the ingress has read this one's when it estimated the cost
    ]

    def note(*cost: int) -> None:
        fetched.append(cost)

    sent = PipelineRequest("r", ChatPrompt([]), sources, SamplingParams(), on_fetched=note)
    assert [item.num_pixels for item in await items.load(sent, PROCESSOR)] == [600, 0, 7]
    assert fetched == [(len(picture), 600), (len(picture), 0)]


async def test_a_modality_may_have_a_limit_of_its_own(items: Items) -> None:
    items._limits = MediaLimits(max_items=3, max_items_of={"image": 1, "audio": 0})
    image, video, audio = (MediaSource(RED, "a field", modality) for modality in ("image", "video", "audio"))
    items.check_number([image, video, video])
    for media, reason in (([image] * 2, "2 image items, the limit is 1"), ([audio], "1 audio items, the limit is 0")):
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            items.check_number(media)
        assert caught.value.code == "too_many_items"
    with pytest.raises(InvalidRequestError, match="4 media items, the limit is 3"):
        items.check_number([video] * 4)


async def test_bytes_of_all_items_are_bounded_while_they_arrive(items: Items, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = items._limits.max_total_bytes
    ended: list[str] = []

    async def content(request: PipelineRequest, source: MediaSource) -> tuple[bytes, int]:
        if source.uuid == "slow":
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("slow")
        return b"x" * (limit // 2 + 1), 0

    monkeypatch.setattr(items, "_content", content)
    sources = [MediaSource(RED, "f", uuid=name) for name in ("a", "slow", "b")]
    sent = PipelineRequest("r", ChatPrompt([]), sources, SamplingParams())
    with pytest.raises(InvalidRequestError, match="bytes of media"):
        await asyncio.wait_for(items.load(sent, PROCESSOR), 5)
    assert ended == ["slow"]
