"""A request's way through the stages: media -> Preprocess -> Encode -> Generate.

Holds references, never tensors. Both caches live here, because what a stage returns belongs to the process that
asked for it: the cached data lies in the object store and outlives the replica that made it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from deployments.config import AppConfig
from deployments.metrics import IngressMetrics
from deployments.stage_calls import CALL_ERRORS, ItemLostError, StageCalls, cancel, translated, two_objects
from deployments.stages import EmbeddingInfo, GeneratedText
from llm.sampling_params import SamplingParams
from preprocess.cache import ItemCache
from preprocess.hasher import mm_hash
from preprocess.media import decode_data_url
from preprocess.media_fetch import MediaFetcher
from preprocess.schema import InvalidRequestError, ItemInfo, ProcessedPrompt

if TYPE_CHECKING:
    from preprocess.processor import Message


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An item as the client sent it: a data: or http(s) URL. `field` names it in errors."""

    url: str
    field: str


@dataclass(slots=True)
class PipelineRequest:
    """What the pipeline needs of a request. Prompt ids, stage times (seconds) and cache hits (items) are filled in
    on the way."""

    request_id: str
    messages: "list[Message]"
    media: list[MediaSource]
    params: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    num_processor_cache_hits: int = 0
    num_embedding_cache_hits: int = 0

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Items run side by side: a stage's time is that of its slowest item."""
        self.stage_seconds[stage] = max(seconds, self.stage_seconds.get(stage, 0.0))


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item's metadata and the reference to its tensors or its embeddings; what both caches hold."""

    info: ItemInfo
    ref: ObjectRef


class Pipeline:
    """Sends requests through the stages; see StageCalls for `on_reply`."""

    def __init__(
        self,
        config: AppConfig,
        preprocess: DeploymentHandle[Any],
        encode: DeploymentHandle[Any],
        generate: DeploymentHandle[Any],
        metrics: IngressMetrics,
        on_reply: Callable[[str], None],
    ) -> None:
        self._limits = config.media.limits()
        self._fetcher = MediaFetcher(self._limits, config.media.fetch_policy())
        self._preprocess = preprocess
        self._encode = encode
        self._generate = generate
        self._metrics = metrics
        self._calls = StageCalls(metrics, on_reply)
        self.processed_items: ItemCache[StoredItem] = ItemCache(config.ingress.processor_cache_bytes)
        self.embeddings: ItemCache[StoredItem] = ItemCache(config.ingress.embedding_cache_bytes)

    async def run(self, request: PipelineRequest, processor_fingerprint: str) -> AsyncGenerator[GeneratedText]:
        """Yields the answer's pieces. What fails before the first one has been tried again where that can help.

        Raises InvalidRequestError for what the client has to change, a StageError for what the server did wrong.
        """
        contents = await self._load_media(request)
        hashes = await asyncio.to_thread(
            lambda: [mm_hash(one, modality="image", processor_fingerprint=processor_fingerprint) for one in contents]
        )
        has_started = False
        for is_last_try in (False, True):
            try:
                prompt, embeddings = await self._prepare(request, contents, hashes)
                async with aclosing(self._decode(request, prompt, embeddings)) as pieces:
                    async for piece in pieces:
                        has_started = True
                        yield piece
                return
            except ItemLostError:
                if is_last_try or has_started:
                    raise
                # Cached data went with the node that held it: forget it and make it anew.
                for key in hashes:
                    self.processed_items.discard(key)
                    self.embeddings.discard(key)

    async def close(self) -> None:
        await self._fetcher.close()

    async def _load_media(self, request: PipelineRequest) -> list[bytes]:
        if len(request.media) > self._limits.max_items:
            raise InvalidRequestError(
                f"{len(request.media)} images, the limit is {self._limits.max_items} per request",
                field="messages",
                code="too_many_items",
            )
        self._check_total_bytes(sum(len(source.url) * 3 // 4 for source in request.media))
        started = time.perf_counter()
        contents = await asyncio.gather(*(self._load(source) for source in request.media))
        self._check_total_bytes(sum(len(content) for content in contents))
        if contents:
            request.add_seconds("media_fetch", time.perf_counter() - started)
            self._metrics.mm_items.inc(len(contents), tags={"modality": "image"})
        return list(contents)

    def _check_total_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_total_bytes:
            raise InvalidRequestError(
                f"{num_bytes} bytes of media, the limit is {self._limits.max_total_bytes} per request",
                field="messages",
                code="media_too_large",
            )

    async def _load(self, source: MediaSource) -> bytes:
        try:
            if source.url.startswith("data:"):
                return await decode_data_url(source.url, limits=self._limits)
            content = await self._fetcher.fetch(source.url)
        except InvalidRequestError as error:
            raise error.for_field(source.field) from error
        self._metrics.mm_media_download_bytes.inc(len(content))
        return content

    async def _prepare(
        self, request: PipelineRequest, contents: list[bytes], hashes: list[str]
    ) -> tuple[ProcessedPrompt, list[ObjectRef]]:
        """Processes and encodes every item side by side; the prompt is rendered while the last are encoded."""
        infos: list[asyncio.Future[ItemInfo]] = [asyncio.get_running_loop().create_future() for _ in contents]
        try:
            async with asyncio.TaskGroup() as group:
                items = [
                    group.create_task(self._embeddings_of(request, source, content, key, info))
                    for source, content, key, info in zip(request.media, contents, hashes, infos, strict=True)
                ]
                prompt = group.create_task(self._render(request, infos, hashes))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return prompt.result(), [item.result() for item in items]

    async def _render(
        self, request: PipelineRequest, infos: list[asyncio.Future[ItemInfo]], hashes: list[str]
    ) -> ProcessedPrompt:
        items = [await info for info in infos]
        started = time.perf_counter()
        prompt = await self._calls.send("preprocess", lambda: self._render_once(request, items, hashes))
        request.add_seconds("render", time.perf_counter() - started)
        request.prompt_token_ids = prompt.prompt_token_ids
        return prompt

    async def _render_once(self, request: PipelineRequest, items: list[ItemInfo], hashes: list[str]) -> ProcessedPrompt:
        prompt: ProcessedPrompt = await self._preprocess.render.remote(request.messages, items, hashes)
        return prompt

    async def _embeddings_of(
        self, request: PipelineRequest, source: MediaSource, content: bytes, key: str, info: asyncio.Future[ItemInfo]
    ) -> ObjectRef:
        """A reference to the item's embeddings; `info` is set as early as it is known."""

        async def create() -> tuple[StoredItem, int]:
            item, is_cached = await self.processed_items.get_or_create(
                key, lambda: self._process_image(request, content)
            )
            request.num_processor_cache_hits += is_cached
            if not info.done():
                info.set_result(item.info)
            return await self._encode_item(request, key, item)

        try:
            encoded, is_cached = await self.embeddings.get_or_create(key, create)
        except InvalidRequestError as error:
            raise error.for_field(source.field) from error
        request.num_embedding_cache_hits += is_cached
        if not info.done():
            info.set_result(encoded.info)
        return encoded.ref

    async def _process_image(self, request: PipelineRequest, content: bytes) -> tuple[StoredItem, int]:
        process_image = self._preprocess.options(stream=True).process_image
        info, tensors = await self._calls.send("preprocess", lambda: two_objects(process_image.remote(content)))
        assert isinstance(info, ItemInfo)
        request.add_seconds("media_decode", info.decode_seconds)
        request.add_seconds("processor", info.process_seconds)
        return StoredItem(info, tensors), info.num_bytes

    async def _encode_item(self, request: PipelineRequest, key: str, item: StoredItem) -> tuple[StoredItem, int]:
        encode = self._encode.options(stream=True).encode
        item_id = f"{request.request_id}-{key}"
        info, embeddings = await self._calls.send(
            "encode", lambda: two_objects(encode.remote(item_id, item.ref, time.time()))
        )
        assert isinstance(info, EmbeddingInfo)
        request.add_seconds("transfer_pixels", info.transfer_seconds)
        request.add_seconds("encode_queue", info.queue_seconds)
        request.add_seconds("encode", info.encode_seconds)
        self._metrics.object_store_transfer_bytes.inc(item.info.num_bytes, tags={"edge": "preprocess_encode"})
        self._metrics.object_store_transfer_bytes.inc(info.num_bytes, tags={"edge": "encode_generate"})
        return StoredItem(item.info, embeddings), info.num_bytes

    async def _decode(
        self, request: PipelineRequest, prompt: ProcessedPrompt, embeddings: list[ObjectRef]
    ) -> AsyncGenerator[GeneratedText]:
        """Streams from Generate; a replica that dies before the first piece costs the client only time."""
        generate = self._generate.options(stream=True).generate
        attempt = 0
        while True:
            has_started = False
            pieces = generate.remote(request.request_id, prompt, request.params, time.time(), *embeddings)
            try:
                async for piece in pieces:
                    has_started = True
                    self._calls.on_reply("generate")
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
