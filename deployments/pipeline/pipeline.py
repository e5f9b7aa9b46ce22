"""A request's way through the stages: media -> Preprocess -> Encode -> Generate."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from deployments.config import AppConfig
from deployments.metrics import IngressMetrics
from deployments.pipeline.items_under_way import ItemsUnderWay
from deployments.pipeline.media_items import LoadedItem, MediaItems, PipelineRequest, all_or_none
from deployments.pipeline.stage_calls import (
    CALL_ERRORS,
    ItemLostError,
    StageCalls,
    StageFailedError,
    cancel,
    own_cancellation_only,
    translated,
)
from deployments.pipeline.uploads import Uploads
from deployments.stages.hand_over import ItemEmbeddings
from deployments.stages.stage_messages import GeneratedText
from preprocess.schema import ChatPrompt, InvalidRequestError, ItemInfo, ProcessedPrompt, ProcessorIdentity, TextPrompt

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
        self.items = MediaItems(config, preprocess, encode, self._calls, metrics, uploads)

    async def run(self, request: PipelineRequest, processor: ProcessorIdentity) -> AsyncGenerator[GeneratedText]:
        """Yields the answer's pieces. What fails before the first one has been tried again where that can help.

        Raises InvalidRequestError for what the client has to change, a StageError for what the server did wrong.
        """
        items = await self.items.load(request, processor)
        has_started = False
        for is_last_try in (False, True):
            try:
                async with aclosing(self._answer(request, items)) as pieces:
                    async for piece in pieces:
                        has_started = True
                        yield piece
                return
            except ItemLostError:
                if is_last_try or has_started:
                    raise
                # Cached data went with the node that held it: forget it and make it anew.
                self.items.forget(items)

    async def render(self, request: PipelineRequest, processor: ProcessorIdentity) -> tuple[ProcessedPrompt, list[str]]:
        """What the engine would get of the request, and the modality of each item in it; nothing is encoded."""
        items = await self.items.load(request, processor)
        infos = [stored.info for stored in await all_or_none([self.items.processed_of(request, one) for one in items])]
        prompt = await self._render(request, infos, [item.key for item in items])
        return prompt, _placed(prompt, [info.modality for info in infos])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        tokenize = self._preprocess.tokenize
        ids: list[int] = await self._calls.send("preprocess", lambda: tokenize.remote(prompt, add_special_tokens))
        return ids

    async def detokenize(self, token_ids: list[int]) -> str:
        text: str = await self._calls.send("preprocess", lambda: self._preprocess.detokenize.remote(token_ids))
        return text

    async def close(self) -> None:
        await self.items.close()

    async def _answer(self, request: PipelineRequest, items: list[LoadedItem]) -> AsyncGenerator[GeneratedText]:
        """Generate begins as soon as somebody encodes every item, and gets the embeddings as they come."""
        async with ItemsUnderWay(self.items, request, items) as under_way:
            infos = await under_way.started()
            prompt = await under_way.meanwhile(self._render(request, infos, [item.key for item in items]))
            embeddings = _placed(prompt, under_way.embeddings())
            async with AsyncExitStack() as stack:
                pieces = await stack.enter_async_context(aclosing(self._decode(request, prompt, embeddings)))
                try:
                    first = await under_way.meanwhile(anext(pieces, None))
                    if first is None:
                        raise StageFailedError("generate", "the generate stage gave no answer")
                    yield first
                except InvalidRequestError as error:
                    raise _by_name(error, _placed(prompt, items)) from error
                except ItemLostError as error:
                    await under_way.finished()
                    if not any(item.is_pending for item in embeddings):
                        raise
                    # Who made an item had died, and it was made elsewhere: what was handed over led nowhere.
                    self._calls.note_again("generate", error)
                    again = self._decode(request, prompt, _placed(prompt, under_way.embeddings()))
                    pieces = await stack.enter_async_context(aclosing(again))
                async for piece in pieces:
                    yield piece

    async def _render(self, request: PipelineRequest, items: list[ItemInfo], hashes: list[str]) -> ProcessedPrompt:
        started = time.perf_counter()
        render, limit = self._preprocess.render, request.max_prompt_tokens
        prompt: ProcessedPrompt = await self._calls.send(
            "preprocess", lambda: render.remote(request.prompt, items, hashes, limit)
        )
        request.add_seconds("render", time.perf_counter() - started)
        if not prompt.prompt_token_ids:
            raise InvalidRequestError("the prompt has no token", field="prompt", code="empty_prompt")
        request.prompt_token_ids = prompt.prompt_token_ids
        return prompt

    async def _decode(
        self, request: PipelineRequest, prompt: ProcessedPrompt, embeddings: list[ItemEmbeddings]
    ) -> AsyncGenerator[GeneratedText]:
        """Streams from Generate; a replica that dies before the first piece costs the client only time."""
        generate = self._generate.options(stream=True).generate
        attempt = 0
        while True:
            has_started = False
            pieces = generate.remote(
                request.request_id,
                prompt,
                request.params,
                embeddings,
                cache_salt=request.tenant_salt,
                priority=request.priority,
                sent_at=time.time(),
            )
            try:
                with own_cancellation_only():
                    async for ready in pieces:
                        self._calls.on_reply("generate")
                        for piece in ready:
                            has_started = True
                            for stage, seconds in piece.seconds.items():
                                request.add_seconds(stage, seconds)
                            yield piece
                return
            except CALL_ERRORS as error:
                if has_started:
                    raise translated(error, "generate") from error
                await self._calls.retry_or_raise(error, "generate", attempt)
                attempt += 1
            except BaseException:
                cancel(pieces)  # the client left
                raise


def _placed(prompt: ProcessedPrompt, items: list[ItemT]) -> list[ItemT]:
    """What there is for each of the request's items, for those that are in the prompt, in its order."""
    return items if prompt.item_order is None else [items[index] for index in prompt.item_order]


def _by_name(error: InvalidRequestError, items: list[LoadedItem]) -> InvalidRequestError:
    """The language model's error, with the client's name for the item that it is about."""
    return error if error.item is None else error.for_field(items[error.item].source.field)
