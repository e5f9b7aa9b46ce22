"""A request's way through the stages: media -> Preprocess -> Encode -> Generate.

Holds references, never tensors. Both caches live here, because what a stage returns belongs to the process that
asked for it: the cached data lies in the object store and outlives the replica that made it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.config import AppConfig
from deployments.engine_loop import EngineDiedError
from deployments.metrics import IngressMetrics
from deployments.stages import EmbeddingInfo, GeneratedText
from llm.sampling_params import SamplingParams
from preprocess.cache import ItemCache
from preprocess.hasher import mm_hash
from preprocess.media import decode_data_url
from preprocess.media_fetch import MediaFetcher
from preprocess.schema import InvalidRequestError, ItemInfo, ProcessedPrompt

if TYPE_CHECKING:
    from preprocess.processor import Message

logger = logging.getLogger("ray.serve")

ResultT = TypeVar("ResultT")
_MAX_ATTEMPTS = 4
_REF_POLL_SECONDS = 0.001


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


class StageError(RuntimeError):
    """What the server, not the client, did wrong, and in which stage."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class StageFailedError(StageError):
    """A stage answered with an error of its own; it would do so again."""


class StageUnavailableError(StageError):
    """A stage has no replica, or they died faster than the request could be sent again."""


class ItemLostError(StageError):
    """The object behind a reference is gone, with the node that held it."""


class Pipeline:
    """Sends requests through the stages; retries what a dying replica took with it. `on_reply(stage)` is called
    whenever a stage has answered, which is a sign of life."""

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
        self._on_reply = on_reply
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
        prompt = await self._retry("preprocess", lambda: self._render_once(request, items, hashes))
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
        info, tensors = await self._retry("preprocess", lambda: _two_objects(process_image.remote(content)))
        assert isinstance(info, ItemInfo)
        request.add_seconds("media_decode", info.decode_seconds)
        request.add_seconds("processor", info.process_seconds)
        return StoredItem(info, tensors), info.num_bytes

    async def _encode_item(self, request: PipelineRequest, key: str, item: StoredItem) -> tuple[StoredItem, int]:
        encode = self._encode.options(stream=True).encode
        item_id = f"{request.request_id}-{key}"
        info, embeddings = await self._retry(
            "encode", lambda: _two_objects(encode.remote(item_id, item.ref, time.time()))
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
        for attempt in range(_MAX_ATTEMPTS):
            has_started = False
            pieces = generate.remote(request.request_id, prompt, request.params, time.time(), *embeddings)
            try:
                async for piece in pieces:
                    has_started = True
                    self._on_reply("generate")
                    for stage, seconds in piece.seconds.items():
                        request.add_seconds(stage, seconds)
                    yield piece
                return
            except (RayError, RayServeException) as error:
                if has_started or not self._may_retry(error, "generate", attempt):
                    raise _translated(error, "generate") from error
            except BaseException:
                _cancel(pieces)  # the client left
                raise
            await _back_off(attempt)

    async def _retry(self, stage: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                result = await call()
                self._on_reply(stage)
                return result
            except (RayError, RayServeException) as error:
                if not self._may_retry(error, stage, attempt):
                    raise _translated(error, stage) from error
                await _back_off(attempt)
        raise AssertionError("the last attempt raises")

    def _may_retry(self, error: Exception, stage: str, attempt: int) -> bool:
        """A stage that answered with an error will answer so again; one that died will not."""
        cause = _cause(error)
        has_died = not isinstance(error, RayTaskError) or isinstance(cause, EngineDiedError)
        if not has_died or isinstance(cause, ObjectLostError) or attempt == _MAX_ATTEMPTS - 1:
            return False
        reason = type(cause).__name__
        logger.warning("%s lost a request (%s), sending it again", stage, reason)
        self._metrics.items_recomputed.inc(tags={"stage": stage, "reason": reason})
        return True


async def _two_objects(response: DeploymentResponseGenerator[Any]) -> tuple[Any, ObjectRef]:
    """The value of a stage's first object and a reference to its second, which stays in the object store."""
    try:
        refs = await response._to_object_ref_gen()
        first = await (await anext(refs))
        # Awaiting a generator's next reference would fetch its value into this process unless it is ready.
        while not (refs.next_ready() or refs.is_finished()):
            await asyncio.sleep(_REF_POLL_SECONDS)
        second = await anext(refs)
        # A stage that died between the two leaves a reference to its error; this raises it.
        await refs.completed()
        return first, second
    except asyncio.CancelledError:
        _cancel(response)
        raise


def _cancel(response: DeploymentResponseGenerator[Any]) -> None:
    # Cancelling a call that never reached a replica raises what kept it from there.
    with contextlib.suppress(Exception):
        response.cancel()


def _cause(error: BaseException) -> BaseException:
    """What lies under Ray's wrapping: the exception of the stage's own code, or of a call that this one needed."""
    cause: BaseException | None = None
    if isinstance(error, RayTaskError):
        cause = error.cause
    elif isinstance(error, RayServeException):
        cause = error.__cause__
    return error if cause is None else cause


def _translated(error: Exception, stage: str) -> Exception:
    """Ray's error as one of ours."""
    cause = _cause(error)
    if isinstance(cause, InvalidRequestError):
        return cause
    if isinstance(cause, ObjectLostError):
        return ItemLostError(stage, f"an item for the {stage} stage is lost")
    if isinstance(error, RayTaskError) and not isinstance(cause, EngineDiedError):
        return StageFailedError(stage, f"the {stage} stage failed")
    return StageUnavailableError(stage, f"the {stage} stage is not available")


async def _back_off(attempt: int) -> None:
    await asyncio.sleep(0.2 * 2**attempt)
