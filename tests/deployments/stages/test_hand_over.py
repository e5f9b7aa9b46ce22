"""Embeddings handed over one by one: what the language model gets when, and what becomes of it when an item fails.
Stages are stand-ins here."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.config import AppConfig
from deployments.pipeline.media_items import LoadedItem, PipelineRequest, StoredItem
from deployments.pipeline.media_source import MediaSource
from deployments.pipeline.pipeline import Pipeline
from deployments.pipeline.stage_calls import ItemLostError, StageFailedError
from deployments.stages.hand_over import EmbeddingsLostError, HandOver, ItemEmbeddings
from deployments.stages.stage_messages import GeneratedText
from deployments.stages.tensor_wire import PackedTensor
from llm.sampling_params import SamplingParams
from preprocess.schema import ChatPrompt, InvalidRequestError, ProcessedPrompt, ProcessorIdentity
from tests.waiting import until

ANSWER = GeneratedText("red", [5], 1, 0, 1, "stop", {})


class Stages(Pipeline):
    """Item i is announced at once as `refs[i][0]`, and made as the last of `refs[i]` when `may_end[i]` is set."""

    def __init__(self, refs: list[list[str]]) -> None:
        inc = SimpleNamespace(inc=lambda *_, **__: None)
        self.recomputed: list[dict[str, str]] = []
        again = SimpleNamespace(inc=lambda tags: self.recomputed.append(tags))
        metrics: Any = SimpleNamespace(mm_items=inc, mm_media_download_bytes=inc, items_recomputed=again)
        nothing: Any = None
        super().__init__(AppConfig(), nothing, nothing, nothing, metrics, nothing, on_reply=lambda stage: None)
        self.refs = refs
        self.may_end = [asyncio.Event() for _ in refs]
        self.failures: list[Exception | None] = [None] * len(refs)
        self.given: list[list[ItemEmbeddings]] = []
        self.is_cancelled = False
        media: Any = self.items
        media.load, media.embeddings_of = self._load, self._embeddings_of

    async def _load(self, request: PipelineRequest, processor: ProcessorIdentity) -> list[LoadedItem]:
        return [LoadedItem(MediaSource(None, "f"), None, "", str(index)) for index, _ in enumerate(self.refs)]

    async def _embeddings_of(
        self, request: PipelineRequest, item: LoadedItem, on_pending: Callable[[StoredItem], None]
    ) -> StoredItem:
        index = int(item.key)
        first, *_, last = (stored(ref) for ref in (*self.refs[index], self.refs[index][-1]))
        on_pending(first)
        try:
            await self.may_end[index].wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        if (failure := self.failures[index]) is not None:
            raise failure
        return last

    async def _render(self, *_: Any) -> ProcessedPrompt:
        return ProcessedPrompt([], [], [])

    async def _decode(self, request: Any, prompt: Any, embeddings: list[ItemEmbeddings]) -> AsyncGenerator[Any]:
        self.given.append(embeddings)
        for index, item in enumerate(embeddings):
            if str(item.ref).startswith("lost"):
                raise ItemLostError("generate", "lost")
            if item.is_pending:
                await self.may_end[index].wait()
        yield ANSWER

    def handed_over(self) -> list[list[tuple[str, bool]]]:
        return [[(str(item.ref), item.is_pending) for item in embeddings] for embeddings in self.given]

    def answer(self) -> AsyncGenerator[GeneratedText]:
        return self.run(PipelineRequest("r", ChatPrompt([]), [], SamplingParams()), ProcessorIdentity("f"))


def stored(ref: str) -> StoredItem:
    nothing: Any = None
    found: Any = ref
    return StoredItem(nothing, found)


async def answers(stages: Stages) -> list[GeneratedText]:
    return [piece async for piece in stages.answer()]


async def test_generate_begins_while_items_are_encoded() -> None:
    stages = Stages([["a"], ["b"]])
    stages.may_end[1].set()
    task = asyncio.create_task(answers(stages))
    await until(lambda: bool(stages.given))
    assert stages.handed_over() == [[("a", True), ("b", False)]]
    stages.may_end[0].set()
    assert await task == [ANSWER]
    assert len(stages.given) == 1


async def test_an_item_that_is_made_elsewhere_is_handed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first replica died, after the language model had been told where it comes from."""
    stages = Stages([["lost a", "a"], ["b"]])
    monkeypatch.setattr(stages.items, "forget", None)  # nothing that is there is made anew
    task = asyncio.create_task(answers(stages))
    await until(lambda: bool(stages.given))
    await asyncio.sleep(0.01)
    assert not task.done()
    for event in stages.may_end:
        event.set()
    assert await task == [ANSWER]
    assert stages.handed_over() == [[("lost a", True), ("b", True)], [("a", False), ("b", False)]]
    assert stages.recomputed == [{"stage": "generate", "reason": "ItemLostError"}]


@pytest.mark.parametrize("anew", ["a", "lost again"])
async def test_a_cached_item_that_is_lost_is_made_anew_once(monkeypatch: pytest.MonkeyPatch, anew: str) -> None:
    """The first try finds out that its embeddings went with their node."""
    stages = Stages([["lost a"]])
    stages.may_end[0].set()
    monkeypatch.setattr(stages.items, "forget", lambda items: stages.refs.__setitem__(0, [anew]))
    if anew == "a":
        assert await answers(stages) == [ANSWER]
    else:
        with pytest.raises(ItemLostError):
            await answers(stages)
    assert stages.handed_over() == [[("lost a", False)], [(anew, False)]]


@pytest.mark.parametrize("is_lost_too", [False, True])
async def test_an_item_that_fails_ends_the_request_with_its_reason(is_lost_too: bool) -> None:
    """Also where the language model notices first, and only knows that something is lost."""
    stages = Stages([["a"], ["lost b" if is_lost_too else "b"]])
    stages.failures[1] = StageFailedError("encode", "the encode stage failed on messages.0.content.1")
    task = asyncio.create_task(answers(stages))
    await until(lambda: bool(stages.given))
    stages.may_end[1].set()
    with pytest.raises(StageFailedError, match=r"messages\.0\.content\.1"):
        await asyncio.wait_for(task, 5)
    assert stages.is_cancelled, "nobody waits for the other item"


async def test_what_the_language_model_refuses_of_an_item_has_the_clients_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: Any) -> list[LoadedItem]:
        return [LoadedItem(MediaSource(None, f"messages[{index}]"), None, "", str(index)) for index in range(2)]

    async def render(*_: Any) -> ProcessedPrompt:
        return ProcessedPrompt([], [], [], item_order=[1, 0])

    async def refuse(*_: Any) -> AsyncGenerator[Any]:
        raise InvalidRequestError("of another width", field="messages", item=0)
        yield

    stages = Stages([["a"], ["b"]])
    monkeypatch.setattr(stages.items, "load", load)
    monkeypatch.setattr(stages, "_render", render)
    monkeypatch.setattr(stages, "_decode", refuse)
    with pytest.raises(InvalidRequestError) as caught:
        await answers(stages)
    assert caught.value.field == "messages[1]", "the prompt's first item is the request's second"


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    stages = Stages([["a"]])
    async with aclosing(stages.answer()) as pieces:
        task = asyncio.ensure_future(anext(pieces))
        await until(lambda: bool(stages.given))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert stages.is_cancelled


async def test_a_deadline_ends_what_is_under_way() -> None:
    """As the ingress waits for the first token."""
    stages = Stages([["a"]])
    async with aclosing(stages.answer()) as pieces:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.05)
    assert len(stages.given) == 1
    assert stages.is_cancelled


def reference(packed: PackedTensor | Exception, delay: float = 0.0) -> Any:
    """As much of a reference to an object as is used."""

    async def get() -> PackedTensor:
        await asyncio.sleep(delay)
        if isinstance(packed, Exception):
            raise packed
        return packed

    return asyncio.ensure_future(get())


async def test_what_is_there_comes_first_and_the_rest_one_by_one() -> None:
    tensors = [torch.full((1, 2), float(index)) for index in range(3)]
    items = [
        ItemEmbeddings(reference(PackedTensor.pack(tensor), delay), is_pending=delay > 0)
        for tensor, delay in zip(tensors, (0.02, 0.0, 0.01), strict=True)
    ]
    hand_over = HandOver(items, sent_at=0.0)
    first, second, third = await hand_over.ready()
    assert (first, third) == (None, None)
    assert second is not None
    assert second.tolist() == tensors[1].tolist()
    got: list[tuple[str, int, list[Any]]] = []
    for wait in hand_over.pending(lambda request_id, index, tensor: got.append((request_id, index, tensor.tolist()))):
        (await wait())("r")
    assert got == [("r", 0, [[0.0, 0.0]]), ("r", 2, [[2.0, 2.0]])]


@pytest.mark.parametrize("is_pending", [False, True])
async def test_embeddings_that_do_not_come_are_an_error(is_pending: bool) -> None:
    hand_over = HandOver([ItemEmbeddings(reference(ValueError("a bug")), is_pending)], 0.0)
    receive = hand_over.pending(lambda *_: None)[0] if is_pending else hand_over.ready
    with pytest.raises(EmbeddingsLostError, match="item 0: ValueError"):
        await receive()
