"""Stages whose every call works, or ends at a given moment because its replica dies. For tests of the pipeline."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError
from ray.serve.exceptions import RayServeException

from raylens.deployments.config import MediaConfig, SharedConfig
from raylens.deployments.item_store.item_maker import ItemMaker
from raylens.deployments.metrics.definitions import IngressMetrics, ItemMetrics
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.merged_answers import Answers
from raylens.deployments.pipeline.pipeline import Pipeline
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.stages.generate_job import GenerateJob
from raylens.deployments.stages.hand_over import EmbeddingsLostError, received_prompt
from raylens.deployments.stages.stage_calls import StageCalls, StageHandles
from raylens.deployments.tracing.spans import Spans
from raylens.deployments.wire.piece_connection import PieceConnections
from raylens.deployments.wire.stage_messages import EmbeddingInfo, GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.data_url import data_url
from raylens.preprocess.schema import (
    ChatPrompt,
    ItemExpansion,
    ItemInfo,
    PlaceholderRange,
    ProcessedPrompt,
    ProcessorIdentity,
    StageTime,
)
from tests.deployments.pipeline.local_items import LocalItems
from tests.pictures import disc, encoded

Death = Literal["dies before", "dies between", "dies after", "lost later", "cancelled before", "cancelled after"]
"""How one call ends. `dies before`: it has given nothing. `dies between`: the caller has references, and nothing comes
behind them; Generate has its embeddings and gives no piece. `dies after`: Generate has given a piece. `lost later`: the
answer was whole, and its data goes with its node. `cancelled`: as Ray Serve ends some calls whose replica died."""

Fate = Literal["works"] | Death | Exception

PROCESSOR = ProcessorIdentity("fingerprint")
PICTURES = [data_url(encoded(disc(colour))) for colour in ("red", "green", "blue")]


def lost() -> ObjectLostError:
    return ObjectLostError("00" * 28, None, "")


def stage_error(cause: Exception) -> RayTaskError:
    return RayTaskError("stage", "traceback", cause)


class Reference:
    """To an object that may not be there yet. Any number of readers may wait for it, and leave."""

    def __init__(self) -> None:
        self.object: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.object).__await__()

    def unpack(self) -> "Reference":
        return self

    def fail(self, error: Exception) -> None:
        self.object.set_exception(error)
        self.object.exception()  # not every reference is read


def packed(ref: Any) -> Any:
    """Stands in for `PackedReference.of`. A stand-in for a reference is its own packed form."""
    return ref


async def arrived(arguments: Sequence[Any]) -> list[Any]:
    """Returns what is behind the references among a call's arguments. Raises the call's error where it cannot be made
    for want of one."""
    try:
        return [await one if isinstance(one, Reference) else one for one in arguments]
    except ActorDiedError as error:
        raise RayServeException("an upstream actor died") from stage_error(error)
    except Exception as error:
        raise stage_error(error) from None


class Results:
    """A stage's response: `number` results of which the caller reads the last. The call is made when its arguments are
    there, and ends when it may."""

    def __init__(self, fate: Fate, number: int, last: Any, may_end: asyncio.Event, *arguments: Any) -> None:
        self._fate, self._last, self._may_end, self._arguments = fate, last, may_end, arguments
        self._number = number
        self.is_cancelled = False

    async def _fetch_future_result_async(self) -> Any:
        await arrived(self._arguments)
        if self._fate == "dies before":
            raise ActorDiedError
        if self._fate == "cancelled before":
            raise asyncio.CancelledError
        self.refs = [Reference() for _ in range(self._number)]
        self._end = asyncio.get_running_loop().create_task(self._settle(self.refs))
        return self

    async def get_async(self) -> Any:
        return await self.refs[-1]

    async def _settle(self, refs: list[Reference]) -> None:
        await self._may_end.wait()
        failure = {"dies between": ActorDiedError()}.get(str(self._fate))
        if isinstance(self._fate, Exception):
            failure = self._fate
        for ref in refs:
            if failure is not None:
                ref.fail(failure)
            elif self._fate == "lost later" and ref is not refs[-1]:
                ref.fail(lost())
            else:
                ref.object.set_result(self._last)

    def cancel(self) -> None:
        self.is_cancelled = True


class Generation:
    """A response of Generate. It reads its prompt and its embeddings, then sends pieces."""

    def __init__(self, fate: Fate, job: GenerateJob) -> None:
        self._fate, self._prompt, self._embeddings, self._address = fate, job.prompt, job.items, job.address
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return self._run().__await__()

    async def _run(self) -> None:
        if isinstance(self._prompt, Reference):
            await received_prompt(self._prompt)  # type: ignore[arg-type]
        connections = PieceConnections()
        try:
            connection = await connections.to(self._address.ingress)
            await self._send(partial(connection.send, self._address.number))
            await asyncio.sleep(0.05)  # until it is sent
        finally:
            connections.close()

    async def _send(self, send: Callable[..., None]) -> None:
        if self._fate == "dies before":
            raise ActorDiedError
        if self._fate == "cancelled before":
            raise asyncio.CancelledError
        for index, item in enumerate(self._embeddings):
            try:
                await item.ref.unpack()
            except Exception as error:
                raise stage_error(EmbeddingsLostError(f"item {index}: {type(error).__name__}")) from None
        if isinstance(self._fate, Exception):
            raise self._fate
        if self._fate == "dies between":
            raise ActorDiedError
        send([GeneratedText("re", [1], 1, 0, 1, None, [StageTime("prefill", 1.0, 0.5)])], is_last=False)
        await asyncio.sleep(0.05)
        if self._fate == "dies after":
            raise ActorDiedError
        if self._fate == "cancelled after":
            raise asyncio.CancelledError
        send([GeneratedText("d", [2], 1, 0, 2, "stop", [])], is_last=True)

    def cancel(self) -> None:
        self.is_cancelled = True


class StandInStages:
    """`fates`: for each stage those of its calls, in their order; further calls work. `calls`: the stages that were
    called, in order.

    `may_process`: until it is set, no call of Preprocess that processes an item ends; `may_render`: the same of those
    that render a prompt; `may_end`: the same of Encode. The renderings of `num_renderings` have the fates of `render`.
    """

    def __init__(self, **fates: Sequence[Fate]) -> None:
        self._fates = {stage: list(told) for stage, told in fates.items()}
        self.calls: list[str] = []
        self.responses: list[Any] = []
        self.handed_over: list[list[bool]] = []
        self.prompts: list[Any] = []
        self.recomputed: list[tuple[str, str]] = []
        self.num_renderings = 0
        self.may_process, self.may_render, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.may_process, self.may_render, self.may_end):
            event.set()

    def _next(self, stage: str) -> Fate:
        self.calls.append(stage)
        return self._fate(stage)

    def _fate(self, stage: str) -> Fate:
        left = self._fates.get(stage, [])
        return left.pop(0) if left else "works"

    def _keep(self, response: Any) -> Any:
        self.responses.append(response)
        return response

    def _process(self, *_: Any) -> Any:
        info = ItemInfo("image", ItemExpansion(np.zeros(1, np.int32), PlaceholderRange(0, 1)), 10)
        return self._keep(Results(self._next("preprocess"), 2, info, self.may_process))

    def _encode(self, item_id: str, modality: str, item: Any, sent_at: float, context: Any) -> Any:
        return self._keep(Results(self._next("encode"), 2, EmbeddingInfo(10, 0.0, 0.0, 0.0), self.may_end, item))

    def _generate(self, job: GenerateJob) -> Any:
        self.handed_over.append([item.is_pending for item in job.items])
        self.prompts.append(job.prompt)
        return self._keep(Generation(self._next("generate"), job))

    def _render(self, prompt: Any, mm_hashes: list[str], truncation: Any, context: Any, infos: list[Any]) -> Any:
        self.num_renderings += 1
        rendered = ProcessedPrompt([1], [], mm_hashes, render_seconds=0.25)
        assert all(isinstance(info, ItemInfo) for info in infos)
        return Results(self._fate("render"), 1, rendered, self.may_render)

    def maker(self) -> ItemMaker:
        encode = _handle(encode=self._encode)
        running = SimpleNamespace(request_router=SimpleNamespace(curr_replicas=["one"]))
        encode._router = SimpleNamespace(_asyncio_router=running)
        stages = {"": StageHandles(self._preprocess, self._generator, {"encode": encode})}
        return ItemMaker(SharedConfig(), stages, StageCalls(self._again), ItemMetrics(), Spans())

    def pipeline(self) -> Pipeline:
        metrics = IngressMetrics()
        metrics.items_recomputed = self._again
        uploads: Any = None
        return Pipeline(
            MediaConfig(),
            self._preprocess,
            self._generator,
            LocalItems(self.maker()),
            metrics,
            uploads,
            Turns(),
            on_reply=lambda stage: None,
        )

    @property
    def _preprocess(self) -> Any:
        return _handle(process_item=self._process, render=self._render)

    @property
    def _generator(self) -> Any:
        return _handle(generate=self._generate)

    @property
    def _again(self) -> Any:
        return SimpleNamespace(inc=lambda stage, reason: self.recomputed.append((stage, reason)))


def _handle(**methods: Any) -> Any:
    stubs = {name: SimpleNamespace(remote=method) for name, method in methods.items()}
    return SimpleNamespace(options=lambda **_: SimpleNamespace(**stubs), **stubs)


def request(num_pictures: int = 1, *, is_rendered: bool = False) -> PipelineRequest:
    """`is_rendered`: by Preprocess, because the client asks for the ids of the prompt's tokens."""
    media = [MediaSource(PICTURES[index], f"messages[{index}]") for index in range(num_pictures)]
    return PipelineRequest("r", ChatPrompt([]), media, SamplingParams(), returns_prompt_ids=is_rendered)


async def ask(stages: StandInStages, sent: PipelineRequest) -> str:
    async with aclosing(answer(stages, sent)) as pieces:
        return "".join([piece.text async for piece in pieces])


def answer(stages: StandInStages, sent: PipelineRequest) -> AsyncGenerator[GeneratedText]:
    return one_by_one(answer_in_lists(stages, sent))


async def answer_in_lists(stages: StandInStages, sent: PipelineRequest) -> AsyncGenerator[list[GeneratedText]]:
    async with running(stages) as pipeline, aclosing(run(pipeline, sent)) as pieces:
        async for ready in pieces:
            yield ready


def pieces_of(pipeline: Pipeline, sent: PipelineRequest) -> AsyncGenerator[GeneratedText]:
    return one_by_one(run(pipeline, sent))


async def one_by_one(pieces: AsyncGenerator[list[GeneratedText]]) -> AsyncGenerator[GeneratedText]:
    async with aclosing(pieces):
        async for ready in pieces:
            for piece in ready:
                yield piece


def run(pipeline: Pipeline, sent: PipelineRequest) -> AsyncGenerator[list[GeneratedText]]:
    return in_lists(pipeline.request(sent, PROCESSOR))


async def in_lists(answers: Answers) -> AsyncGenerator[list[GeneratedText]]:
    try:
        while pieces := await answers.next():
            yield pieces
    finally:
        await answers.aclose()


@asynccontextmanager
async def running(stages: StandInStages) -> AsyncIterator[Pipeline]:
    """A pipeline, whose caches keep what its requests have brought."""
    pipeline = stages.pipeline()
    await pipeline.open()
    try:
        yield pipeline
    finally:
        await pipeline.close()
