"""A request's way through the stages, of which any may die before, between and after each hand-over."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest

from raylens.deployments.item_store.client import OnPending
from raylens.deployments.item_store.item_states import ItemOrder, ItemTrace, SharedItem
from raylens.deployments.pipeline.merged_answers import MergedAnswers
from raylens.deployments.pipeline.pipeline_request import seconds_by_stage
from raylens.deployments.stages.engine_loop import EngineDiedError
from raylens.deployments.stages.hand_over import PromptLostError
from raylens.deployments.stages.stage_calls import StageFailedError, StageUnavailableError
from raylens.deployments.wire.stage_messages import GeneratedText, UnrenderedPrompt
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, ProcessedPrompt
from tests.deployments.pipeline.local_items import LocalItems
from tests.deployments.pipeline.stand_in_stages import (
    PROCESSOR,
    Fate,
    Results,
    StandInStages,
    answer,
    ask,
    in_lists,
    pieces_of,
    request,
    running,
    stage_error,
)
from tests.waiting import until

P, E, G = "preprocess", "encode", "generate"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real_sleep(min(seconds, 0.001)))


async def test_a_request_goes_through_every_stage_once_and_its_trace_tells_of_it() -> None:
    stages, sent = StandInStages(), request(is_rendered=True)
    assert await ask(stages, sent) == "red"
    assert stages.calls == [P, E, G]
    assert sent.trace.prompt_token_ids == [1]
    assert seconds_by_stage(sent.trace.times)["prefill"] == 0.5
    assert seconds_by_stage(sent.trace.times)["render"] == 0.25
    assert {"media_fetch", "render", "encode"} <= seconds_by_stage(sent.trace.times).keys()


async def test_an_answer_that_is_faster_than_the_news_of_its_items_waits_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = LocalItems.embeddings_of

    async def made_late(*arguments: Any) -> Any:
        found = await made(*arguments)
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.2)
        return found

    monkeypatch.setattr(LocalItems, "embeddings_of", made_late)
    sent = request()
    async with aclosing(answer(StandInStages(), sent)) as pieces:
        async for piece in pieces:
            assert ("encode" in seconds_by_stage(sent.trace.times)) == (piece.finish_reason is not None)


async def test_what_preprocess_makes_goes_on_without_waiting_for_the_ingress_to_hear_of_it() -> None:
    stages = StandInStages()
    stages.may_process.clear()
    task = asyncio.create_task(ask(stages, request(2)))
    await until(lambda: stages.calls == [P, P, E, E])
    stages.may_process.set()
    assert await task == "red"
    assert (stages.calls, stages.num_renderings) == ([P, P, E, E, G], 0)


async def test_generate_is_called_while_the_prompt_is_rendered() -> None:
    stages, sent = StandInStages(), request(is_rendered=True)
    stages.may_render.clear()
    task = asyncio.create_task(ask(stages, sent))
    await until(lambda: stages.calls == [P, E, G])
    stages.may_render.set()
    assert await task == "red"
    assert (stages.calls, stages.num_renderings, sent.trace.prompt_token_ids) == ([P, E, G], 1, [1])


async def test_generate_begins_while_items_are_encoded() -> None:
    stages = StandInStages()
    stages.may_end.clear()
    task = asyncio.create_task(ask(stages, request(2)))
    await until(lambda: stages.handed_over == [[True, True]])
    stages.may_end.set()
    assert await task == "red"


DEATHS: list[tuple[str, Fate, list[str]]] = [
    # Before Encode has a reference to the tensors, after that, and when they were there, but are lost.
    (P, "dies before", [P, P, E, G]),
    (P, "dies between", [P, E, P, E, G]),
    (P, "lost later", [P, E, P, E, G]),
    # The same of the embeddings. Generate has a reference to them in the second case, and in the third finds them lost.
    (E, "dies before", [P, E, E, G]),
    (E, "dies between", [P, E, G, E, G]),
    (E, "lost later", [P, E, G, P, E, G]),
    # Generate before it has read its embeddings, and after.
    (G, "dies before", [P, E, G, G]),
    (G, "dies between", [P, E, G, G]),
    # As Ray Serve tells of some deaths.
    (P, "cancelled before", [P, P, E, G]),
    (E, "cancelled before", [P, E, E, G]),
    (G, "cancelled before", [P, E, G, G]),
]


@pytest.mark.parametrize(("stage", "fate", "calls"), DEATHS)
async def test_a_death_before_the_first_piece_costs_time_only(stage: str, fate: Fate, calls: list[str]) -> None:
    stages = StandInStages(**{stage: [fate]})
    if (stage, fate) == (E, "dies between"):  # while Generate waits
        stages.may_end.clear()
        task = asyncio.create_task(ask(stages, request()))
        await until(lambda: stages.handed_over == [[True]])
        stages.may_end.set()
        assert await task == "red"
        assert sorted(stages.calls) == sorted(calls)
        assert len(stages.handed_over) == 2
    else:
        assert await ask(stages, request()) == "red"
        assert stages.calls == calls
    assert stages.recomputed


@pytest.mark.parametrize("fate", ["dies before", "dies between", "cancelled before"])
async def test_a_death_while_the_prompt_is_rendered_costs_time_only(fate: Fate) -> None:
    stages, sent = StandInStages(render=[fate]), request(is_rendered=True)
    assert await ask(stages, sent) == "red"
    assert stages.num_renderings == 2
    assert stages.calls.count(E) == 1
    assert sent.trace.prompt_token_ids == [1]


async def test_generate_gets_the_prompt_itself_when_it_is_called_again() -> None:
    """What the reference is to may have gone with its node."""
    stages = StandInStages(generate=["dies between"])
    stages.may_render.clear()
    task = asyncio.create_task(ask(stages, request(is_rendered=True)))
    await until(lambda: len(stages.prompts) == 1)
    stages.may_render.set()
    assert await task == "red"
    assert [isinstance(prompt, ProcessedPrompt) for prompt in stages.prompts] == [False, True]


async def test_generate_is_called_again_when_the_prompt_does_not_reach_it() -> None:
    stages = StandInStages(generate=[stage_error(PromptLostError("OwnerDiedError"))])
    stages.may_render.clear()
    task = asyncio.create_task(ask(stages, request(0, is_rendered=True)))
    await until(lambda: len(stages.prompts) == 1)
    stages.may_render.set()
    assert await task == "red"
    assert (stages.calls, stages.num_renderings) == ([G, G], 1)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_prompt_that_is_refused_ends_the_request_while_its_items_are_encoded(has_begun: bool) -> None:
    """Also where Generate has been called with a reference to the prompt, and fails for want of it."""
    stages = StandInStages(render=[stage_error(InvalidRequestError("too long", field="messages"))])
    stages.may_end.clear()
    if has_begun:
        stages.may_render.clear()
    task = asyncio.create_task(ask(stages, request(is_rendered=True)))
    if has_begun:
        await until(lambda: bool(stages.handed_over))
        stages.may_render.set()
    with pytest.raises(InvalidRequestError, match="messages: too long"):
        await asyncio.wait_for(task, 5)
    assert stages.recomputed == []


@pytest.mark.parametrize("stage", [P, E, G])
async def test_a_stage_whose_replicas_die_each_time_is_unavailable(stage: str) -> None:
    fates: list[Fate] = ["dies before", "cancelled before"] * 2
    stages = StandInStages(**{stage: fates})
    with pytest.raises(StageUnavailableError) as caught:
        await ask(stages, request())
    assert caught.value.stage == stage
    assert len(stages.recomputed) == 3


async def test_embeddings_that_are_lost_each_time_make_the_stage_unavailable() -> None:
    stages = StandInStages(encode=["lost later"] * 4)
    with pytest.raises(StageUnavailableError, match="an item for the generate stage is lost"):
        await ask(stages, request())
    assert stages.calls.count(E) == 4


async def test_only_what_is_lost_is_made_again() -> None:
    """The other item's replica is alive, and its embeddings are still in the making."""
    stages = StandInStages(encode=["dies between", "works"])
    stages.may_end.clear()
    task = asyncio.create_task(ask(stages, request(2)))
    await until(lambda: stages.handed_over == [[True, True]])
    stages.may_end.set()
    assert await task == "red"
    assert stages.calls.count(E) == 3
    assert stages.calls.count(P) == 2


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("fate", ["dies after", "cancelled after"])
async def test_a_death_after_the_first_piece_ends_every_answer_of_the_request(fate: Fate, num_prompts: int) -> None:
    broken, whole = StandInStages(generate=[fate]), StandInStages()
    found: list[tuple[int, str]] = []
    async with running(broken) as first, running(whole) as second:
        parts = [pipeline.request(request(), PROCESSOR) for pipeline in (first, second)[:num_prompts]]
        answers = parts[0] if num_prompts == 1 else MergedAnswers(parts, num_answers=1, at_once=8)
        with pytest.raises(StageUnavailableError):
            await collect(in_lists(answers), found)
    assert found.count((0, "re")) == 1
    assert broken.recomputed == []


async def collect(pieces: AsyncIterator[list[GeneratedText]], found: list[tuple[int, str]]) -> None:
    async for ready in pieces:
        found += [(piece.index, piece.text) for piece in ready]


async def test_items_are_given_back_at_the_end_the_lost_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    made = LocalItems.embeddings_of

    async def kept(
        items: LocalItems, order: ItemOrder, on_pending: OnPending, pins: ExitStack
    ) -> tuple[SharedItem, ItemTrace]:
        pins.callback(given_back.append, order.mm_hash)
        return await made(items, order, on_pending, pins)

    monkeypatch.setattr(LocalItems, "embeddings_of", kept)
    async with running(StandInStages(encode=["lost later"])) as pipeline:
        asked = pipeline.request(request(), PROCESSOR)
        while await asked.next():
            assert given_back == []
        await asked.aclose()
    assert len(given_back) == 2


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_item_that_fails_ends_the_request_with_its_reason(is_first: bool) -> None:
    """Also where Generate notices first, and only knows that something is lost."""
    failure = stage_error(ValueError("a bug"))
    stages = StandInStages(encode=[failure] if is_first else ["works", failure])
    stages.may_end.clear()
    task = asyncio.create_task(ask(stages, request(2)))
    await until(lambda: bool(stages.handed_over))
    stages.may_end.set()
    with pytest.raises(StageFailedError, match=rf"messages\[{0 if is_first else 1}\]"):
        await asyncio.wait_for(task, 5)


async def test_what_generate_refuses_of_an_item_has_the_clients_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = stage_error(InvalidRequestError("of another width", field="messages", item=0))
    stages = StandInStages(generate=[refusal])

    def render(prompt: object, mm_hashes: list[str], *_: object) -> Results:
        return Results("works", 1, ProcessedPrompt([1], [], mm_hashes, item_order=[1, 0]), stages.may_render)

    monkeypatch.setattr(stages, "_render", render)
    with pytest.raises(InvalidRequestError) as caught:
        await ask(stages, request(2))
    assert caught.value.field == "messages[1]", "the prompt's first item is the request's second"


@pytest.mark.parametrize("stage", [E, G])
async def test_a_client_that_leaves_cancels_the_calls_and_makes_no_other(stage: str) -> None:
    stages = StandInStages()
    stages.may_end.clear()
    async with aclosing(answer(stages, request())) as pieces:
        task = asyncio.ensure_future(anext(pieces))
        await until(lambda: bool(stages.handed_over))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    encoding, generating = stages.responses[-2:]
    assert {E: encoding, G: generating}[stage].is_cancelled
    assert stages.recomputed == []


async def test_a_deadline_ends_what_is_under_way() -> None:
    """As the ingress waits for the first token."""
    stages = StandInStages()
    stages.may_end.clear()
    async with aclosing(answer(stages, request())) as pieces:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.05)
    assert all(response.is_cancelled for response in stages.responses[1:])


async def test_a_short_text_is_one_call() -> None:
    stages, sent = StandInStages(), request(0)
    assert await ask(stages, sent) == "red"
    assert (stages.calls, stages.num_renderings) == ([G], 0)
    assert stages.prompts == [UnrenderedPrompt(sent.prompt, sent.truncation)]


@pytest.mark.parametrize("is_new", [True, False])
async def test_generate_renders_a_short_prompt_with_pictures(is_new: bool) -> None:
    """With new ones, while they are encoded."""
    stages = StandInStages()
    async with running(stages) as pipeline:
        if not is_new:
            assert [piece.text async for piece in pieces_of(pipeline, request(2))] == ["re", "d"]
        assert [piece.text async for piece in pieces_of(pipeline, request(2))] == ["re", "d"]
    assert stages.num_renderings == 0
    prompt = stages.prompts[-1]
    assert len(prompt.mm_hashes) == 2
    assert [info.modality for info in prompt.items] == ["image", "image"]
    assert stages.handed_over[-1] == [is_new, is_new]


async def test_a_mistake_in_a_picture_that_generate_finds_has_the_client_s_name_for_it() -> None:
    stages = StandInStages(generate=["works", stage_error(InvalidRequestError("too large", field="item", item=1))])
    async with running(stages) as pipeline:
        assert [piece.text async for piece in pieces_of(pipeline, request(2))] == ["re", "d"]
        with pytest.raises(InvalidRequestError, match=r"messages\[1\]: too large"):
            await anext(pieces_of(pipeline, request(2)))


@pytest.mark.parametrize("fate", ["dies before", "cancelled before"])
async def test_a_short_text_is_sent_again_when_its_replica_dies(fate: Fate) -> None:
    stages = StandInStages(generate=[fate])
    assert await ask(stages, request(0)) == "red"
    assert (stages.calls, stages.num_renderings) == ([G, G], 0)


async def test_a_long_text_is_rendered_where_no_stream_waits_for_it() -> None:
    stages = StandInStages()
    sent = replace(request(0), prompt=ChatPrompt([{"role": "user", "content": "a" * 10_000}]))
    assert await ask(stages, sent) == "red"
    assert (stages.calls, stages.num_renderings) == ([G], 1)


async def test_a_text_whose_token_ids_are_asked_for_has_them_in_its_trace() -> None:
    stages, sent = StandInStages(), replace(request(0), returns_prompt_ids=True)
    assert await ask(stages, sent) == "red"
    assert (stages.num_renderings, sent.trace.prompt_token_ids) == (1, [1])


async def test_an_engine_s_death_is_known_where_its_error_comes_as_it_is() -> None:
    """By gRPC, nothing of Ray is wrapped around it."""
    stages = StandInStages(generate=[EngineDiedError("the engine has stopped")])
    assert await ask(stages, request(0)) == "red"
    assert stages.calls == [G, G]


async def test_a_stage_s_own_error_is_final_where_it_comes_as_it_is() -> None:
    stages = StandInStages(generate=[RuntimeError("broken")])
    with pytest.raises(StageFailedError, match="the generate stage failed"):
        await ask(stages, request(0))
    assert stages.calls == [G]


async def test_a_client_s_mistake_is_not_its_own_cause_where_it_comes_as_it_is() -> None:
    stages = StandInStages(generate=[InvalidRequestError("too long", field="prompt")])
    with pytest.raises(InvalidRequestError, match="too long") as caught:
        await ask(stages, request(0))
    assert caught.value.__cause__ is None
