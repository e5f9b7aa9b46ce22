"""Computes items or finds them in a cache: content -> processed tensors -> embeddings.

This process holds references only, never the tensors. The caller of a stage owns its results, so cached data outlives
the replica that computed it. The object store keeps one copy a node."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ray import ObjectRef

from raylens.deployments.config import SharedConfig
from raylens.deployments.item_store.early_result import Announce, EarlyResult
from raylens.deployments.item_store.encoder_choice import EncoderPlace, cheapest
from raylens.deployments.item_store.item_states import (
    ContentMissingError,
    ItemOrder,
    ItemTrace,
    MadeItem,
    OnPending,
    PendingItem,
    StoredItem,
)
from raylens.deployments.metrics.definitions import CacheMetrics, ItemMetrics
from raylens.deployments.ray_internals.handles import has_running_replica, objects_of
from raylens.deployments.request_context import in_request
from raylens.deployments.stages.stage_calls import StageCalls, StageHandles, StageUnavailableError, with_pending
from raylens.deployments.tracing.spans import OpenSpan, Spans
from raylens.deployments.wire.stage_messages import EmbeddingInfo, ItemJob
from raylens.preprocess.cache import ItemCache
from raylens.preprocess.schema import ItemInfo

logger = logging.getLogger(f"ray.serve.{__name__}")

ResultT = TypeVar("ResultT")
ItemProcessing = EarlyResult[PendingItem, StoredItem]
StoredItems = ItemCache[StoredItem, PendingItem]


class ItemMaker:
    """One shard of the items: both caches, and the calls that fill them. Concurrent orders of equal items share one
    computation. All models share the caches; each has its own stages."""

    def __init__(
        self,
        config: SharedConfig,
        stages: Mapping[str, StageHandles],
        calls: StageCalls,
        metrics: ItemMetrics,
        spans: Spans,
    ) -> None:
        """`stages`: those of each model, by the `model` of item orders."""
        self._spans = spans
        self._first: dict[str, OpenSpan] = {}
        """Per item in progress: the span of the order that started it."""
        self._contents: dict[str, dict[object, bytes | ObjectRef]] = {}
        """Per item in progress: the contents that its open orders brought, without lost ones."""
        self._stages = stages
        self._encoders = {
            model: [EncoderPlace(stage, one, partial(has_running_replica, one)) for stage, one in own.encoders.items()]
            for model, own in stages.items()
        }
        self._calls = calls
        self._metrics = metrics
        self.processed = _cache(config.processor_cache_bytes // config.shards, metrics.mm_cache)
        self.embeddings = _cache(config.embedding_cache_bytes // config.shards, metrics.encoder_cache)

    async def processed_of(self, order: ItemOrder) -> MadeItem:
        """Returns the processed item without embeddings. Raises like `embeddings_of`."""
        trace = ItemTrace()
        with self._watched(order, trace) as span:
            order = replace(order, context=span.context)
            return MadeItem(await self._with_content(order, lambda: self._processed(order, trace)), trace)

    async def embeddings_of(self, order: ItemOrder, on_pending: OnPending) -> MadeItem:
        """Returns the item with its embeddings. For new embeddings, `on_pending` gets the item once a Preprocess
        replica has taken it, and again once an Encode replica has. If one of them dies, `on_pending` gets the item
        again from its replacement.

        Raises InvalidRequestError, a StageError, or ContentMissingError."""
        trace = ItemTrace()
        with self._watched(order, trace) as span:
            order = replace(order, context=span.context)
            stored = await self._with_content(order, lambda: self._embeddings_of(order, span, on_pending, trace))
            self._metrics.encoder_cache.count_query(order.modality, is_hit=trace.was_encoded)
            return MadeItem(stored, trace)

    async def _embeddings_of(
        self, order: ItemOrder, span: OpenSpan, on_pending: OnPending, trace: ItemTrace
    ) -> StoredItem:
        async def create(announce: Announce[PendingItem]) -> tuple[StoredItem, int]:
            with in_request(order.context):
                return await self._make(order, trace, announce)

        first = self._first.setdefault(order.mm_hash, span)
        try:
            stored, trace.was_encoded = await self.embeddings.get_or_create(order.mm_hash, create, on_pending)
        finally:
            if first is span:
                del self._first[order.mm_hash]
        if first is not span and not trace.was_encoded and not trace.times:  # computed, but for another order
            span.link(first.context)
            trace.made_for = first.context.request_id
        return stored

    async def _with_content(self, order: ItemOrder, make: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Awaits `make()`. Meanwhile, all orders of the item may use this order's content.

        `make()` may join earlier work that lacks this order's content and fails for that reason; then it is called
        again. Later work has this order's content and fails only if that is lost. So each further failure uses up one
        of the item's contents, and their number bounds the calls."""
        if order.content is None:
            return await make()
        contents, own = self._contents.setdefault(order.mm_hash, {}), object()
        contents[own] = order.content
        try:
            while True:
                try:
                    return await make()
                except ContentMissingError:
                    if own not in contents:
                        raise
        finally:
            contents.pop(own, None)
            if not contents and self._contents.get(order.mm_hash) is contents:
                del self._contents[order.mm_hash]

    async def _make(
        self, order: ItemOrder, trace: ItemTrace, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        """Returns the item with its embeddings, and their size in bytes."""
        processing = ItemProcessing(
            lambda note: self._processed(order, trace, note),
            lambda processed: PendingItem(processed.info, processed.ref),
            lambda pending: announce(PendingItem(pending.info, None)),
        )
        async with aclosing(processing):
            if order.is_precomputed and (processed := await processing.result()).info.is_encoded:
                return processed, processed.info.num_bytes
            return await self._encode_item(order, trace, processing, announce)

    @contextmanager
    def _watched(self, order: ItemOrder, trace: ItemTrace) -> Iterator[OpenSpan]:
        """Opens a span over an order. The stages' spans for the item are its children."""
        missing = None
        attributes = {"raylens.modality": order.modality, "raylens.mm_hash": order.mm_hash}
        with in_request(order.context), self._spans.span("item", order.context, attributes) as span:
            try:
                yield span
                logger.debug("%s %s: %s", order.modality, order.mm_hash, trace.origin or "made")
                span.describe({"raylens.detail": trace.origin})
            except ContentMissingError as error:  # not an error of the span
                missing = error
                span.describe({"raylens.detail": "its content is missing"})
        if missing is not None:
            raise missing

    def evict(self, mm_hash: str, lost: ObjectRef) -> None:
        """Evicts an item from both caches after the node with its embeddings `lost` is gone. Keeps an item that was
        recomputed since."""
        entry = self.embeddings.peek(mm_hash)
        if entry is None or entry.ref == lost:
            self.embeddings.discard(mm_hash)
            self.processed.discard(mm_hash)

    def _check_model(self, order: ItemOrder, stage: str) -> None:
        """Raises StageUnavailableError for a model that this shard does not know, during an update that adds or removes
        it."""
        if order.model not in self._stages:
            raise StageUnavailableError(stage, f"the {stage} stage is not available")

    async def _processed(
        self, order: ItemOrder, trace: ItemTrace, on_pending: Announce[PendingItem] = lambda pending: None
    ) -> StoredItem:
        async def create(announce: Announce[PendingItem]) -> tuple[StoredItem, int]:
            with in_request(order.context):
                return await self._process(order, trace, announce)

        processed, trace.was_processed = await self.processed.get_or_create(order.mm_hash, create, on_pending)
        self._metrics.mm_cache.count_query(order.modality, is_hit=trace.was_processed)
        return processed

    async def _process(
        self, order: ItemOrder, trace: ItemTrace, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        contents = self._contents.get(order.mm_hash, {})
        if not contents:
            raise ContentMissingError
        source, content = next(iter(contents.items()))
        job = ItemJob(
            order.modality,
            content,
            order.num_pixels,
            order.num_in_prompt,
            order.options,
            order.is_precomputed,
            order.context,
        )
        self._check_model(order, "preprocess")
        process_item = self._stages[order.model].preprocess.options(stream=True).process_item

        async def call() -> tuple[ObjectRef, Any]:
            (tensors, _), info = await objects_of(
                process_item.remote(job), 2, lambda tensors, info: announce(PendingItem(info, tensors))
            )
            return tensors, info

        async def give_up() -> None:
            contents.pop(source, None)  # its ingress is gone, and the content with it
            raise ContentMissingError

        tensors, info = await self._calls.send("preprocess", call, give_up)
        assert isinstance(info, ItemInfo)
        trace.times += info.times
        return StoredItem(info, tensors), info.num_bytes

    async def _encode_item(
        self, order: ItemOrder, trace: ItemTrace, processing: ItemProcessing, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        self._check_model(order, "encode")
        encoders = self._encoders[order.model]
        item_id = f"{order.request_id}-{order.mm_hash}"

        def announce_embeddings(embeddings: ObjectRef, _: ObjectRef) -> None:
            assert processing.latest is not None, "Encode gets no item that Preprocess has not taken"
            announce(PendingItem(processing.latest.info, embeddings))

        async def tensors() -> ObjectRef:
            ref = (await processing.early()).ref
            assert ref is not None, "an item is processed once there are references to its metadata and its tensors"
            return ref

        async def encode_tensors(tensors: ObjectRef) -> tuple[ObjectRef, Any]:
            encoder = cheapest(encoders, order.num_pixels)
            encode = encoder.handle.options(stream=True).encode
            with encoder.call(order.num_pixels) as answered:
                response = encode.remote(item_id, order.modality, tensors, time.time(), order.context)
                (embeddings, _), info = await objects_of(response, 2, announce_embeddings)
                assert isinstance(info, EmbeddingInfo)
                answered(info)
            trace.encoded_by = encoder.stage
            return embeddings, info

        async def process_again() -> None:
            self.processed.discard(order.mm_hash)
            processing.start()

        embeddings, info = await self._calls.send(
            "encode", lambda: with_pending(tensors, processing.result, encode_tensors), process_again
        )
        assert isinstance(info, EmbeddingInfo)
        processed = await processing.result()
        trace.times += info.times
        self._metrics.object_store_transfer_bytes.inc(processed.info.num_bytes, edge="preprocess_encode")
        self._metrics.object_store_transfer_bytes.inc(info.num_bytes, edge="encode_generate")
        return StoredItem(processed.info, embeddings), info.num_bytes


def _cache(capacity_bytes: int, metrics: CacheMetrics) -> StoredItems:
    return StoredItems(capacity_bytes, lambda item: metrics.count_eviction(item.info.modality))
