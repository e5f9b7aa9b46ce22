"""A request's way through the stages: media -> Preprocess -> Encode -> Generate."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeAlias

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from raylens.deployments.config import MediaConfig
from raylens.deployments.item_store.early_result import Announce, EarlyResult
from raylens.deployments.item_store.shared_items import SharedItems, SharedUploads
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.items_under_way import Infos, ItemsUnderWay
from raylens.deployments.pipeline.media_items import LoadedItem, MediaItems, all_or_none
from raylens.deployments.pipeline.piece_receiver import AnswerStream, PieceReceiver
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.ray_internals.handles import by_grpc, objects_of
from raylens.deployments.routing.prefix_router import PromptAffinity
from raylens.deployments.routing.prompt_affinity import affinity_of
from raylens.deployments.stages.stage_calls import StageCalls, StageFailedError, with_pending
from raylens.deployments.wire.piece_connection import PieceAddress
from raylens.deployments.wire.stage_messages import GeneratedText, UnrenderedPrompt
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, ProcessedPrompt, ProcessorIdentity, TextPrompt

Rendering = EarlyResult[ProcessedPrompt | ObjectRef, ProcessedPrompt]
"""A request's prompt, or a reference to it while it is pending."""
GivenPrompt: TypeAlias = UnrenderedPrompt | ProcessedPrompt | ObjectRef
"""The forms in which Generate takes a prompt."""
Begun: TypeAlias = tuple[list[GeneratedText], AsyncGenerator[list[GeneratedText]]]
"""The first pieces of a request's answers, and a generator of the others."""


class Pipeline:
    """Sends requests through the stages of one model; see StageCalls for `on_reply`."""

    def __init__(
        self,
        config: MediaConfig,
        preprocess: DeploymentHandle[Any],
        generate: DeploymentHandle[Any],
        items: SharedItems,
        metrics: IngressMetrics,
        uploads: SharedUploads,
        turns: Turns,
        on_reply: Callable[[str], None],
        *,
        model: str = "",
        chooses_by_prefix: bool = False,
    ) -> None:
        """`model`: see `ItemOrder`. `chooses_by_prefix`: Generate has several replicas, and a prompt goes to the
        replica with its cached prefix."""
        self._preprocess = preprocess
        self._generate = generate
        self._generate_text = by_grpc(generate)
        self._chooses_by_prefix = chooses_by_prefix
        self._calls = StageCalls(metrics.items_recomputed, on_reply)
        self._receiver = PieceReceiver(turns)
        self._items = MediaItems(config, items, metrics, uploads, on_reply, model=model)

    async def open(self) -> None:
        """Prepares for requests. Call this before the first."""
        await self._receiver.open()

    async def run(self, request: PipelineRequest, processor: ProcessorIdentity) -> AsyncGenerator[list[GeneratedText]]:
        """Yields the answers' pieces; pieces that are ready together are one list.

        Stages do not wait for the pipeline to receive their inputs. Encode and the rendering of the prompt get
        references to pending results of Preprocess. The pipeline calls Generate once every item is being encoded, with
        a reference to the prompt; the embeddings follow as they are ready. A failure before the first piece is retried
        where that can help (`StageCalls`).

        Raises InvalidRequestError for a mistake of the client, a StageError for a failure of the server."""
        items = await self._items.load(request, processor)
        async with ItemsUnderWay(self._items, request, items) as under_way, AsyncExitStack() as opened:
            unrendered = await self._unrendered(under_way)
            if unrendered is not None:
                ready, answers = await self._begin_unrendered(under_way, unrendered, opened)
            else:
                ready, answers = await self._render_and_begin(under_way, opened)
            while ready:
                if any(piece.finish_reason is not None for piece in ready):
                    await under_way.settled()
                for piece in ready:
                    request.trace.times += piece.times
                yield ready
                ready = await anext(answers, [])

    async def render(self, request: PipelineRequest, processor: ProcessorIdentity) -> tuple[ProcessedPrompt, list[str]]:
        """Returns the engine's input for the request, and each item's modality, without encoding anything."""
        items = await self._items.load(request, processor)
        infos = await all_or_none([self._items.processed_of(request, one) for one in items])
        prompt = await self._render(request, items, lambda render: render(infos))
        return prompt, prompt.placed([info.modality for info in infos])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        tokenize = self._preprocess.tokenize
        ids: list[int] = await self._calls.send("preprocess", lambda: tokenize.remote(prompt, add_special_tokens))
        return ids

    async def detokenize(self, token_ids: list[int]) -> str:
        text: str = await self._calls.send("preprocess", lambda: self._preprocess.detokenize.remote(token_ids))
        return text

    async def close(self) -> None:
        await self._receiver.close()
        await self._items.close()

    async def _render(
        self,
        request: PipelineRequest,
        items: Sequence[LoadedItem],
        with_infos: Callable[[Callable[[Infos], Awaitable[ProcessedPrompt]]], Awaitable[ProcessedPrompt]],
        announce: Announce[ObjectRef] = lambda ref: None,
    ) -> ProcessedPrompt:
        """`with_infos` calls a function with the items' metadata, or with references to it."""
        render, mm_hashes = self._preprocess.options(stream=True).render, [item.mm_hash for item in items]

        async def call(infos: Infos) -> ProcessedPrompt:
            response = render.remote(request.prompt, mm_hashes, request.truncation, request.context, *infos)
            _, prompt = await objects_of(response, 1, announce)
            assert isinstance(prompt, ProcessedPrompt)
            return prompt

        prompt = await self._calls.send("preprocess", lambda: with_infos(call))
        request.trace.times.append(prompt.render_time("Preprocess"))
        request.trace.prompt_token_ids = prompt.prompt_token_ids
        return prompt

    async def _unrendered(self, under_way: ItemsUnderWay) -> UnrenderedPrompt | None:
        """Returns the prompt for Generate to render. None: it is long, or Preprocess still works on one of its
        items."""
        request, items = under_way.request, under_way.loaded
        infos = await under_way.processed_infos() if items else []
        if infos is None or not request.is_short(sum(len(info.expansion.token_ids) for info in infos)):
            return None
        return UnrenderedPrompt(request.prompt, request.truncation, tuple(item.mm_hash for item in items), tuple(infos))

    async def _begin_unrendered(
        self, under_way: ItemsUnderWay, unrendered: UnrenderedPrompt, opened: AsyncExitStack
    ) -> Begun:
        begun, items = self._begin(under_way, lambda: unrendered, opened), under_way.loaded
        if not items:
            return await begun
        async with _naming_item(items, lambda: self._render(under_way.request, items, under_way.with_infos)):
            return await under_way.meanwhile(begun)

    async def _render_and_begin(self, under_way: ItemsUnderWay, opened: AsyncExitStack) -> Begun:
        """Has Preprocess render the prompt. See `_begin` for the rest."""
        request, items = under_way.request, under_way.loaded
        rendering = Rendering(
            lambda announce: self._render(request, items, under_way.with_infos, announce), lambda prompt: prompt
        )
        await opened.enter_async_context(aclosing(rendering))

        async def begin(prompt: ProcessedPrompt | ObjectRef) -> Begun:
            # A retry sends the prompt itself: the referenced object may be lost with its node.
            return await self._begin(under_way, lambda: rendering.result_or(prompt), opened)

        async with _naming_item(items, rendering.result):
            begun = await under_way.meanwhile(with_pending(rendering.early, rendering.result, begin))
            await rendering.result()
            return begun

    async def _begin(
        self, under_way: ItemsUnderWay, prompt: Callable[[], GivenPrompt], opened: AsyncExitStack
    ) -> Begun:
        """Calls Generate once all items are being encoded. Each attempt calls `prompt`. `opened` closes the returned
        generator."""
        request, affinity = under_way.request, None
        if self._chooses_by_prefix:
            mm_hashes = [item.mm_hash for item in under_way.loaded]
            affinity = affinity_of(request.prompt, mm_hashes, salt=request.prefix_salt, key=request.cache_key)
        await under_way.started()
        answers = self._calls.stream(
            "generate",
            lambda: self._answers(under_way, prompt(), affinity),
            under_way.make_lost_again,
        )
        await opened.enter_async_context(aclosing(answers))
        ready = await anext(answers, None)
        if ready is None:
            raise StageFailedError("generate", "the generate stage gave no answer")
        return ready, answers

    def _answers(self, under_way: ItemsUnderWay, prompt: GivenPrompt, affinity: PromptAffinity | None) -> AnswerStream:
        request, embeddings = under_way.request, under_way.hand_over()
        has_references = embeddings or not isinstance(prompt, UnrenderedPrompt)
        handle = self._generate if has_references else self._generate_text
        if affinity is not None:
            handle = handle.options(session_id=affinity.session_id)

        options = {"cache_salt": request.cache_salt, "priority": request.priority, "adapter": request.adapter}

        def start(address: PieceAddress) -> DeploymentResponse[None]:
            return handle.generate.remote(
                request.request_id, prompt, request.params, embeddings, address, request.context, **options
            )

        return self._receiver.call(start, request.cache_salt)


@asynccontextmanager
async def _naming_item(
    items: Sequence[LoadedItem], prompt: Callable[[], Awaitable[ProcessedPrompt]]
) -> AsyncIterator[None]:
    """Gives an error about an item of the prompt the client's name for that item."""
    try:
        yield
    except InvalidRequestError as error:
        if error.item is None:
            raise
        raise error.for_field((await prompt()).placed(list(items))[error.item].source.field) from error
