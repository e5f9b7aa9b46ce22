"""From what a client sent to embeddings: loads and hashes items, and calls Preprocess and Encode for what no cache has.

This module holds references, never tensors. The caches live here, in the ingress, because what a stage returns belongs
to the process that called the stage. The cached data lies in the object store, one copy a node, and outlives the
replica that made it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from deployments.config import AppConfig
from deployments.metrics import IngressMetrics
from deployments.pipeline.in_the_making import Announce, InTheMaking
from deployments.pipeline.item_states import LoadedItem, PendingItem, StoredItem
from deployments.pipeline.media_source import UPLOAD_SCHEME, MediaSource
from deployments.pipeline.named_contents import NamedContents
from deployments.pipeline.pipeline_request import PipelineRequest
from deployments.pipeline.stage_calls import (
    PlugInFailedError,
    StageCalls,
    StageFailedError,
    objects_of,
    with_pending,
)
from deployments.pipeline.uploads import Uploads
from deployments.stages.stage_messages import EmbeddingInfo, ItemJob
from preprocess.cache import ItemCache
from preprocess.hasher import content_hash, mm_hash
from preprocess.local_media import LocalMedia
from preprocess.media_fetch import MediaFetcher
from preprocess.pixel_count import work_pixels
from preprocess.schema import InvalidRequestError, ItemInfo, ProcessorIdentity

ItemProcessing = InTheMaking[PendingItem, StoredItem]


class MediaItems:
    """Loads and prepares the items of requests, each only once."""

    def __init__(
        self,
        config: AppConfig,
        preprocess: DeploymentHandle[Any],
        encode: DeploymentHandle[Any],
        calls: StageCalls,
        metrics: IngressMetrics,
        uploads: Uploads,
    ) -> None:
        self._limits = config.media.limits
        self._fetcher = MediaFetcher(self._limits, config.media.fetch)
        self._uploads = uploads
        local_root = config.media.local_root
        self._local = LocalMedia(None if local_root is None else Path(local_root), self._limits)
        self._preprocess = preprocess
        self._encode = encode
        self._calls = calls
        self._metrics = metrics
        self._named = NamedContents(config.ingress.max_named_items)
        self.processed: ItemCache[StoredItem, PendingItem] = ItemCache(config.ingress.processor_cache_bytes)
        self.embeddings: ItemCache[StoredItem, PendingItem] = ItemCache(config.ingress.embedding_cache_bytes)

    async def close(self) -> None:
        await self._fetcher.close()

    async def load(self, request: PipelineRequest, processor: ProcessorIdentity) -> list[LoadedItem]:
        """Fetches, checks and hashes the request's items. Raises InvalidRequestError."""
        if len(request.media) > self._limits.max_items:
            raise InvalidRequestError(
                f"{len(request.media)} media items, the limit is {self._limits.max_items} per request",
                field="messages",
                code="too_many_items",
            )
        self._check_total_bytes(sum(data.num_bytes for source in request.media if (data := source.data) is not None))
        started = time.perf_counter()
        contents = await self._contents(request)
        items = [
            await self._hashed(request, source, content, num_pixels, processor)
            for source, (content, num_pixels) in zip(request.media, contents, strict=True)
        ]
        if items:
            request.trace.add_seconds("media_fetch", time.perf_counter() - started)
        for item in items:
            self._metrics.mm_items.inc(tags={"modality": item.source.modality})
        return items

    async def processed_of(self, request: PipelineRequest, item: LoadedItem) -> StoredItem:
        """Returns the item processed but not encoded, for prompts that are only rendered."""
        try:
            return await self._processed(request, item)
        except _ContentMissingError:
            raise _not_cached(item.source) from None
        except InvalidRequestError as error:
            raise _of_item(error, item.source) from error

    async def embeddings_of(
        self, request: PipelineRequest, item: LoadedItem, on_pending: Announce[PendingItem]
    ) -> StoredItem:
        """Returns the item with its embeddings. If they do not exist yet, `on_pending` gets the item as soon as a
        replica of Preprocess has taken it, and again as soon as a replica of Encode has. It gets the item once more
        each time that another replica makes it because the first one died."""

        async def create(announce: Announce[PendingItem]) -> tuple[StoredItem, int]:
            processing = ItemProcessing(
                lambda note: self._processed(request, item, note),
                lambda processed: PendingItem(processed.info, processed.ref),
                lambda pending: announce(PendingItem(pending.info, None)),
            )
            async with aclosing(processing):
                if item.source.is_precomputed and (processed := await processing.finished()).info.is_encoded:
                    return processed, processed.info.num_bytes
                return await self._encode_item(request, item, processing, announce)

        try:
            encoded, is_cached = await self._get_or_create(item, create, on_pending)
        except InvalidRequestError as error:
            raise _of_item(error, item.source) from error
        request.trace.num_embedding_cache_hits += is_cached
        if item.source.uuid is not None and item.content is not None:
            self._named.remember(request.cache_salt, item.source.uuid, item.hashed_content)
        return encoded

    async def _get_or_create(
        self,
        item: LoadedItem,
        create: Callable[[Announce[PendingItem]], Awaitable[tuple[StoredItem, int]]],
        on_pending: Announce[PendingItem],
    ) -> tuple[StoredItem, bool]:
        while True:
            try:
                return await self.embeddings.get_or_create(item.mm_hash, create, on_pending)
            except _ContentMissingError:
                if item.content is None:
                    raise _not_cached(item.source) from None
                # The attempt that failed was another request's, which had only the item's name.

    def forget(self, items: Sequence[LoadedItem]) -> None:
        """Drops items from both caches, because the node that held their data is gone."""
        for item in items:
            self.processed.discard(item.mm_hash)
            self.embeddings.discard(item.mm_hash)

    def _check_total_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_total_bytes:
            raise InvalidRequestError(
                f"{num_bytes} bytes of media, the limit is {self._limits.max_total_bytes} per request",
                field="messages",
                code="media_too_large",
            )

    async def _contents(self, request: PipelineRequest) -> list[tuple[bytes | None, int]]:
        """Loads all contents side by side. The first failure ends the others; too many bytes in all is one."""
        num_bytes = 0

        async def load(source: MediaSource) -> tuple[bytes | None, int]:
            nonlocal num_bytes
            content, num_pixels = await self._content(request, source)
            num_bytes += len(content or b"")
            self._check_total_bytes(num_bytes)
            return content, num_pixels

        return await all_or_none([load(source) for source in request.media])

    async def _content(self, request: PipelineRequest, source: MediaSource) -> tuple[bytes | None, int]:
        """Returns an item's content and its work in pixels."""
        if source.url is None:
            return None, 0
        try:
            if (data := source.data) is not None:
                return await data.decode(self._limits), source.num_pixels
            if source.url.startswith(UPLOAD_SCHEME):
                file_id = source.url.removeprefix(UPLOAD_SCHEME)
                content = await self._uploads.read(request.cache_salt, file_id)
            elif source.url.startswith("file:"):
                content = await self._local.read(source.url)
            else:
                content = await self._fetcher.fetch(source.url)
                self._metrics.mm_media_download_bytes.inc(len(content))
        except InvalidRequestError as error:
            raise _of_item(error, source) from error
        num_pixels = 0 if source.is_precomputed else work_pixels(source.modality, content, self._limits)
        request.on_fetched(len(content), num_pixels)
        return content, num_pixels

    async def _hashed(
        self,
        request: PipelineRequest,
        source: MediaSource,
        content: bytes | None,
        num_pixels: int,
        processor: ProcessorIdentity,
    ) -> LoadedItem:
        if content is not None:
            hashed_content = await asyncio.to_thread(content_hash, content)
        else:
            assert source.uuid is not None
            found = self._named.find(request.cache_salt, source.uuid)
            if found is None:
                raise _not_cached(source)
            hashed_content = found
        item_hash = mm_hash(
            hashed_content,
            modality=source.modality,
            processor_fingerprint=processor.fingerprint,
            options=request.options,
            is_among_others=source.modality in processor.count_dependent and request.num_alike(source) > 1,
            is_precomputed=source.is_precomputed,
            cache_salt=request.cache_salt,
        )
        if content is None and item_hash not in self.embeddings and item_hash not in self.processed:
            raise _not_cached(source)
        return LoadedItem(source, content, num_pixels, hashed_content, item_hash)

    async def _processed(
        self, request: PipelineRequest, item: LoadedItem, on_pending: Announce[PendingItem] = lambda pending: None
    ) -> StoredItem:
        processed, is_cached = await self.processed.get_or_create(
            item.mm_hash, lambda announce: self._process(request, item, announce), on_pending
        )
        request.trace.num_processor_cache_hits += is_cached
        return processed

    async def _process(
        self, request: PipelineRequest, item: LoadedItem, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        source, content = item.source, item.content
        if content is None:
            raise _ContentMissingError
        job = ItemJob(
            source.modality,
            content,
            item.num_pixels,
            request.num_alike(source),
            request.options,
            source.is_precomputed,
        )
        # The same item goes to the same replica from any ingress, because that node has what the item needs.
        process_item = self._preprocess.options(stream=True, session_id=item.mm_hash).process_item

        async def call() -> tuple[ObjectRef, Any]:
            (tensors, _), info = await objects_of(
                process_item.remote(job), 2, lambda tensors, info: announce(PendingItem(info, tensors))
            )
            return tensors, info

        tensors, info = await self._calls.send("preprocess", call)
        assert isinstance(info, ItemInfo)
        request.trace.add_seconds("media_decode", info.decode_seconds)
        request.trace.add_seconds("processor", info.process_seconds)
        return StoredItem(info, tensors), info.num_bytes

    async def _encode_item(
        self, request: PipelineRequest, item: LoadedItem, processing: ItemProcessing, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        encode = self._encode.options(stream=True, session_id=item.mm_hash).encode
        item_id = f"{request.request_id}-{item.mm_hash}"

        def announce_embeddings(embeddings: ObjectRef, _: ObjectRef) -> None:
            assert processing.latest is not None, "Encode gets no item that Preprocess has not taken"
            announce(PendingItem(processing.latest.info, embeddings))

        async def tensors() -> ObjectRef:
            ref = (await processing.pending()).ref
            assert ref is not None, "an item is processed once there are references to its metadata and its tensors"
            return ref

        async def encode_tensors(tensors: ObjectRef) -> tuple[ObjectRef, Any]:
            response = encode.remote(item_id, item.source.modality, tensors, time.time())
            (embeddings, _), info = await objects_of(response, 2, announce_embeddings)
            return embeddings, info

        async def process_again() -> None:
            self.processed.discard(item.mm_hash)
            processing.start()

        try:
            embeddings, info = await self._calls.send(
                "encode", lambda: with_pending(tensors, processing.finished, encode_tensors), process_again
            )
        except PlugInFailedError as error:
            raise PlugInFailedError(error.stage, f"{item.source.field}: {error}") from error
        except StageFailedError as error:
            raise StageFailedError(error.stage, f"the {error.stage} stage failed on {item.source.field}") from error
        assert isinstance(info, EmbeddingInfo)
        processed = await processing.finished()
        request.trace.add_seconds("transfer_pixels", info.transfer_seconds)
        request.trace.add_seconds("encode_queue", info.queue_seconds)
        request.trace.add_seconds("encode", info.encode_seconds)
        self._metrics.object_store_transfer_bytes.inc(processed.info.num_bytes, tags={"edge": "preprocess_encode"})
        self._metrics.object_store_transfer_bytes.inc(info.num_bytes, tags={"edge": "encode_generate"})
        return StoredItem(processed.info, embeddings), info.num_bytes


class _ContentMissingError(Exception):
    """An item has to be made anew, but the client has only named it."""


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs the coroutines side by side and returns their results. The first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _of_item(error: InvalidRequestError, source: MediaSource) -> InvalidRequestError:
    """Returns a library's error about a media item with the client's name for the item."""
    return error.for_field(source.field) if error.field in ("media", "file_id") else error


def _not_cached(source: MediaSource) -> InvalidRequestError:
    return InvalidRequestError(
        f"no item is kept under the uuid {(source.uuid or '')[:100]!r} (any more): send it once again",
        field=source.field,
        code="media_not_cached",
    )
