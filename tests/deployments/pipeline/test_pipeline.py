"""The stream from Generate, when Ray ends it or the client does. The stage is a stand-in here."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import AppConfig
from deployments.pipeline.media_items import PipelineRequest
from deployments.pipeline.merged_pieces import merged
from deployments.pipeline.pipeline import Pipeline
from deployments.pipeline.stage_calls import StageUnavailableError
from deployments.stages.stage_messages import GeneratedText
from llm.sampling_params import SamplingParams
from preprocess.schema import ChatPrompt, ProcessedPrompt, ProcessorIdentity
from tests.waiting import until


def piece(text: str, finish_reason: str | None = None) -> GeneratedText:
    return GeneratedText(text, [], 1, 0, 1, finish_reason, {})


class Call:
    """One call's pieces, then its end: by Ray, as when a replica dies, or never."""

    def __init__(self, *pieces: GeneratedText, by_ray: bool = False, waits: bool = False) -> None:
        self._pieces, self._by_ray, self._waits = pieces, by_ray, waits
        self.is_waiting = self.is_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[list[GeneratedText]]:
        for one in self._pieces:
            yield [one]
        if self._by_ray:
            raise asyncio.CancelledError
        if self._waits:
            self.is_waiting = True
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Generated(Pipeline):
    """Each of `calls` is what one call of Generate gives; prompts have no media."""

    def __init__(self, *calls: Call) -> None:
        self.recomputed: list[str] = []
        again = SimpleNamespace(inc=lambda tags: self.recomputed.append(tags["reason"]))
        metrics: Any = SimpleNamespace(items_recomputed=again)
        unmade = list(calls)
        stub = SimpleNamespace(remote=lambda *_, **__: unmade.pop(0))
        generate: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(generate=stub))
        nothing: Any = None
        super().__init__(AppConfig(), nothing, nothing, generate, metrics, nothing, on_reply=lambda stage: None)

    async def _render(self, *_: Any) -> ProcessedPrompt:
        return ProcessedPrompt([1], [], [])

    def answer(self) -> AsyncGenerator[GeneratedText]:
        return self.run(PipelineRequest("r", ChatPrompt([]), [], SamplingParams()), ProcessorIdentity("f"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real_sleep(min(seconds, 0.001)))


async def test_a_call_that_ray_cancelled_before_its_first_piece_is_made_again() -> None:
    pipeline = Generated(Call(by_ray=True), Call(by_ray=True), Call(piece("red", "stop")))
    assert [one.text async for one in pipeline.answer()] == ["red"]
    assert pipeline.recomputed == ["TaskCancelledError"] * 2


async def test_a_stage_whose_calls_ray_cancels_each_time_is_unavailable() -> None:
    pipeline = Generated(*(Call(by_ray=True) for _ in range(4)))
    with pytest.raises(StageUnavailableError):
        [one async for one in pipeline.answer()]


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_a_call_that_ray_cancelled_after_its_first_piece_ends_with_an_error(num_prompts: int) -> None:
    broken, others = Generated(Call(piece("re"), by_ray=True)), [Generated(Call(piece("blue"), waits=True))]
    pieces = merged([each.answer() for each in [broken, *others][:num_prompts]], num_answers=1)
    for _ in range(num_prompts):
        await anext(pieces)
    with pytest.raises(StageUnavailableError):
        await asyncio.wait_for(anext(pieces), 5)
    assert broken.recomputed == []


@pytest.mark.parametrize("has_started", [False, True])
async def test_a_client_that_leaves_ends_its_call_and_makes_no_other(has_started: bool) -> None:
    call = Call(*([piece("re")] if has_started else []), waits=True)
    pipeline = Generated(call)
    async with aclosing(pipeline.answer()) as pieces:
        if has_started:
            await anext(pieces)
        task = asyncio.ensure_future(anext(pieces))
        await until(lambda: call.is_waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert call.is_cancelled
    assert pipeline.recomputed == []
