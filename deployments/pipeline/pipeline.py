"""A request's way through the stages: media -> Preprocess -> Encode -> Generate."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.config import AppConfig
from deployments.metrics import IngressMetrics
from deployments.pipeline.items_under_way import Infos, ItemsUnderWay
from deployments.pipeline.media_items import LoadedItem, MediaItems, all_or_none
from deployments.pipeline.piece_receiver import AnswerStream, PieceReceiver
from deployments.pipeline.pipeline_request import PipelineRequest
from deployments.pipeline.stage_calls import StageCalls, StageFailedError
from deployments.pipeline.uploads import Uploads
from deployments.stages.hand_over import ItemEmbeddings
from deployments.stages.piece_connection import PieceAddress
from deployments.stages.stage_messages import GeneratedText
from preprocess.schema import ChatPrompt, InvalidRequestError, ProcessedPrompt, ProcessorIdentity, TextPrompt

ItemT = TypeVar("ItemT")


class Pipeline:
    """Sends requests through the stages; see StageCalls for `on_reply`."""

    def __init__(
        self,
        config: AppConfig,
        preprocess: DeploymentHandle[Any],
        encode: DeploymentHandle[Any],
        generate: DeploymentHandle[Any],
        metrics: IngressMetrics,
        uploads: Uploads,
        on_reply: Callable[[str], None],
    ) -> None:
        self._preprocess = preprocess
        self._generate = generate
        self._calls = StageCalls(metrics, on_reply)
        self._receiver = PieceReceiver()
        self.items = MediaItems(config, preprocess, encode, self._calls, metrics, uploads)

    async def open(self) -> None:
        """Prepares for requests. Call this before the first."""
        await self._receiver.open()

    async def run(self, request: PipelineRequest, processor: ProcessorIdentity) -> AsyncGenerator[GeneratedText]:
        """Yields the answers' pieces. No stage waits for the pipeline to hear of a result that the stage needs: Encode
        and the rendering of the prompt get references to what Preprocess is still making. Generate is called as soon as
        every item is being encoded, and gets the embeddings as they come. A failure before the first piece is tried
        again where that can help (`StageCalls`).

        Raises InvalidRequestError for a mistake of the client, a StageError for a failure of the server.
        """
        items = await self.items.load(request, processor)
        async with ItemsUnderWay(self.items, request, items) as under_way:
            prompt = await under_way.meanwhile(self._render(request, items, under_way.with_infos))
            await under_way.started()
            answers = self._calls.stream(
                "generate",
                lambda: self._answers(request, prompt, _placed(prompt, under_way.hand_over())),
                under_way.make_lost_again,
            )
            async with aclosing(answers):
                try:
                    ready = await under_way.meanwhile(anext(answers, None))
                except InvalidRequestError as error:
                    raise _by_name(error, _placed(prompt, items)) from error
                if ready is None:
                    raise StageFailedError("generate", "the generate stage gave no answer")
                while ready is not None:
                    for piece in ready:
                        for stage, seconds in piece.seconds.items():
                            request.trace.add_seconds(stage, seconds)
                        yield piece
                    ready = await anext(answers, None)

    async def render(self, request: PipelineRequest, processor: ProcessorIdentity) -> tuple[ProcessedPrompt, list[str]]:
        """Returns what the engine would get of the request, and each item's modality, without encoding anything."""
        items = await self.items.load(request, processor)
        infos = [stored.info for stored in await all_or_none([self.items.processed_of(request, one) for one in items])]
        prompt = await self._render(request, items, lambda render: render(infos))
        return prompt, _placed(prompt, [info.modality for info in infos])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        tokenize = self._preprocess.tokenize
        ids: list[int] = await self._calls.send("preprocess", lambda: tokenize.remote(prompt, add_special_tokens))
        return ids

    async def detokenize(self, token_ids: list[int]) -> str:
        text: str = await self._calls.send("preprocess", lambda: self._preprocess.detokenize.remote(token_ids))
        return text

    async def close(self) -> None:
        await self._receiver.close()
        await self.items.close()

    async def _render(
        self,
        request: PipelineRequest,
        items: Sequence[LoadedItem],
        with_infos: Callable[[Callable[[Infos], Awaitable[ProcessedPrompt]]], Awaitable[ProcessedPrompt]],
    ) -> ProcessedPrompt:
        """`with_infos` calls a function with the items' metadata, or with references to it."""
        render, mm_hashes = self._preprocess.render, [item.mm_hash for item in items]

        async def call(infos: Infos) -> ProcessedPrompt:
            prompt: ProcessedPrompt = await render.remote(request.prompt, mm_hashes, request.truncation, *infos)
            return prompt

        prompt = await self._calls.send("preprocess", lambda: with_infos(call))
        request.trace.add_seconds("render", prompt.render_seconds)
        if not prompt.prompt_token_ids:
            raise InvalidRequestError("the prompt has no token", field="prompt", code="empty_prompt")
        request.trace.prompt_token_ids = prompt.prompt_token_ids
        return prompt

    def _answers(
        self, request: PipelineRequest, prompt: ProcessedPrompt, embeddings: list[ItemEmbeddings]
    ) -> AnswerStream:
        def start(address: PieceAddress) -> DeploymentResponse[None]:
            return self._generate.generate.remote(
                request.request_id,
                prompt,
                request.params,
                embeddings,
                address,
                cache_salt=request.cache_salt,
                priority=request.priority,
                sent_at=time.time(),
            )

        return self._receiver.call(start)


def _placed(prompt: ProcessedPrompt, items: list[ItemT]) -> list[ItemT]:
    """Returns those of `items`, in the order of the request, that are in the prompt, in its order."""
    return items if prompt.item_order is None else [items[index] for index in prompt.item_order]


def _by_name(error: InvalidRequestError, items: list[LoadedItem]) -> InvalidRequestError:
    """Returns the language model's error with the client's name for the item that it is about."""
    return error if error.item is None else error.for_field(items[error.item].source.field)
