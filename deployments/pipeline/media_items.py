"""Fetches, checks and hashes the items of a request, then orders them from the items that all ingresses share."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylens.deployments.config import MediaConfig
from raylens.deployments.item_store.client import OnPending
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, ItemTrace, SharedItem
from raylens.deployments.item_store.shared_items import SharedItems, SharedUploads
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.media_source import UPLOAD_SCHEME, MediaSource
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from raylens.preprocess.data_url import is_data_url
from raylens.preprocess.hasher import content_hash, mm_hash
from raylens.preprocess.local_media import LocalMedia
from raylens.preprocess.media_fetch import MediaFetcher
from raylens.preprocess.pixel_count import work_pixels
from raylens.preprocess.schema import InvalidRequestError, ItemInfo, ProcessorIdentity, Stopwatch

_INLINE_BYTES = 2**17
"""Hashing this much takes 25 microseconds, less than handing it to a thread."""


@dataclass(frozen=True, slots=True)
class LoadedItem:
    """An item, its hash in both caches, and its work in pixels. `content`: None if the client sent only a name; then
    the item must be in a cache. `model`: the model whose stages make the item, see `ItemOrder`."""

    source: MediaSource
    content: bytes | None
    num_pixels: int
    hashed_content: str
    mm_hash: str
    model: str = ""

    def order_of(self, request: PipelineRequest) -> ItemOrder:
        return ItemOrder(
            request.context,
            request.request_id,
            self.model,
            self.mm_hash,
            self.source.modality,
            self.content,
            self.num_pixels,
            request.num_alike(self.source),
            request.options_of(self.source),
            self.source.is_precomputed,
        )


class MediaItems:
    """Loads the items of requests and gets their results from the stages of a `model`, see `ItemOrder`. `on_reply`: see
    StageCalls."""

    def __init__(
        self,
        config: MediaConfig,
        items: SharedItems,
        metrics: IngressMetrics,
        uploads: SharedUploads,
        on_reply: Callable[[str], None],
        *,
        model: str = "",
    ) -> None:
        self._model = model
        self._limits = config.limits
        self._fetcher = MediaFetcher(self._limits, config.fetch)
        self._uploads = uploads
        self._local = LocalMedia(None if config.local_root is None else Path(config.local_root), self._limits)
        self._items = items
        self._metrics = metrics
        self._on_reply = on_reply

    async def close(self) -> None:
        await self._fetcher.close()

    async def load(self, request: PipelineRequest, processor: ProcessorIdentity) -> list[LoadedItem]:
        """Fetches, checks and hashes the request's items. Raises InvalidRequestError."""
        self.check_number(request.media)
        self._check_total_bytes(sum(data.num_bytes for source in request.media if (data := source.data) is not None))
        watch = Stopwatch()
        contents = await self._contents(request)
        items = []
        for source, (content, num_pixels) in zip(request.media, contents, strict=True):
            hashed_content, item_hash = await self._hashes(request, source, content, processor)
            items.append(LoadedItem(source, content, num_pixels, hashed_content, item_hash, self._model))
        if items:
            request.trace.times.append(watch.read("media_fetch", process_name()))
        return items

    async def read(self, source: MediaSource, cache_salt: str) -> bytes:
        """Returns the content of a URL. Raises InvalidRequestError."""
        try:
            if source.url is None:
                raise _not_cached(source)
            return await self._read(source, source.url, cache_salt)
        except InvalidRequestError as error:
            raise error.for_field(source.field) from error

    async def processed_of(self, request: PipelineRequest, item: LoadedItem) -> ItemInfo:
        """Returns the metadata of the item, processed but not encoded, for `/render`."""
        with _naming(request, item.source):
            processed, trace = await self._items.processed_of(item.order_of(request))
        self._note(request, trace)
        return processed.info

    async def embeddings_of(
        self, request: PipelineRequest, item: LoadedItem, on_pending: OnPending, pins: ExitStack
    ) -> SharedItem:
        """Returns the item with its embeddings, which are kept until `pins` is closed. `on_pending`: see
        `ItemMaker.embeddings_of`."""
        with _naming(request, item.source):
            made, trace = await self._items.embeddings_of(item.order_of(request), on_pending, pins)
        self._note(request, trace)
        if item.source.uuid is not None and item.content is not None:
            self._items.remember_name(request.cache_salt, item.source.uuid, item.hashed_content)
        return made

    def evict(self, item: LoadedItem, lost: PackedReference) -> None:
        """Evicts an item whose embeddings are lost with their node."""
        self._items.evict(item.mm_hash, lost)

    def _note(self, request: PipelineRequest, trace: ItemTrace) -> None:
        request.trace.num_processor_cache_hits += trace.was_processed
        request.trace.num_embedding_cache_hits += trace.was_encoded
        request.trace.times += trace.times
        if any(one.stage == "processor_queue" for one in trace.times):
            self._on_reply("preprocess")
        if trace.encoded_by is not None:
            self._on_reply(trace.encoded_by)

    def check_number(self, media: Sequence[MediaSource]) -> None:
        """Raises InvalidRequestError for more media than a request may have."""
        if len(media) > self._limits.max_items:
            reason = f"{len(media)} media items, the limit is {self._limits.max_items} per request"
            raise InvalidRequestError(reason, field="messages", code="too_many_items")
        for modality, limit in self._limits.max_items_of.items():
            number = sum(source.modality == modality for source in media)
            if number > limit:
                reason = f"{number} {modality} items, the limit is {limit} per request"
                raise InvalidRequestError(reason, field="messages", code="too_many_items")

    def _check_total_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_total_bytes:
            reason = f"{num_bytes} bytes of media, the limit is {self._limits.max_total_bytes} per request"
            raise InvalidRequestError(reason, field="messages", code="media_too_large")

    async def _contents(self, request: PipelineRequest) -> list[tuple[bytes | None, int]]:
        """Loads all contents in parallel. The first failure cancels the others. Too many bytes in all are a failure."""
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
            content = await self._read(source, source.url, request.cache_salt)
        except InvalidRequestError as error:
            raise _of_item(error, request, source) from error
        if is_data_url(source.url):
            return content, source.num_pixels
        num_pixels = 0 if source.is_precomputed else work_pixels(source.modality, content, self._limits)
        request.on_fetched(len(content), num_pixels)
        return content, num_pixels

    async def _read(self, source: MediaSource, url: str, cache_salt: str) -> bytes:
        """Returns the content of the source's URL."""
        if (data := source.data) is not None:
            return await data.decode(self._limits)
        if url.startswith(UPLOAD_SCHEME):
            return await self._uploads.read(cache_salt, url.removeprefix(UPLOAD_SCHEME))
        if url.startswith("file:"):
            return await self._local.read(url)
        content = await self._fetcher.fetch(url)
        self._metrics.mm_media_download_bytes.inc(len(content))
        return content

    async def _hashes(
        self, request: PipelineRequest, source: MediaSource, content: bytes | None, processor: ProcessorIdentity
    ) -> tuple[str, str]:
        """Returns the hash of an item's content, and the item's in both caches."""
        if content is not None:
            is_small = len(content) < _INLINE_BYTES
            hashed_content = content_hash(content) if is_small else await asyncio.to_thread(content_hash, content)
        else:
            assert source.uuid is not None
            found = await self._items.find_name(request.cache_salt, source.uuid)
            if found is None:
                raise _not_cached(source)
            hashed_content = found
        item_hash = mm_hash(
            hashed_content,
            modality=source.modality,
            model=self._model,
            processor_fingerprint=processor.fingerprint,
            options=request.options_of(source),
            is_among_others=source.modality in processor.count_dependent and request.num_alike(source) > 1,
            is_precomputed=source.is_precomputed,
            cache_salt=request.cache_salt,
        )
        return hashed_content, item_hash


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs the coroutines in parallel and returns their results. The first failure cancels the others and is raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def _naming(request: PipelineRequest, source: MediaSource) -> Iterator[None]:
    """Gives errors the client's name for the item."""
    try:
        yield
    except ContentMissingError:
        if source.url is None:
            raise _not_cached(source) from None
        raise StageUnavailableError("items", f"{source.field} is lost") from None
    except InvalidRequestError as error:
        raise _of_item(error, request, source) from error
    except PlugInFailedError as error:
        raise PlugInFailedError(error.stage, f"{source.field}: {error}") from error
    except StageFailedError as error:
        raise StageFailedError(error.stage, f"the {error.stage} stage failed on {source.field}") from error


def _of_item(error: InvalidRequestError, request: PipelineRequest, source: MediaSource) -> InvalidRequestError:
    """Returns a library's error about a media item, with the client's name for the item or the option."""
    if error.field in ("media", "file_id"):
        return error.for_field(source.field)
    field, _, option = error.field.rpartition(".")
    if field == "mm_processor_kwargs" and source.modality == "video" and option in request.video_options:
        return error.for_field(f"media_io_kwargs.video.{option}")
    return error


def _not_cached(source: MediaSource) -> InvalidRequestError:
    reason = f"no item is kept under the uuid {(source.uuid or '')[:100]!r} (any more): send it once again"
    return InvalidRequestError(reason, field=source.field, code="media_not_cached")
