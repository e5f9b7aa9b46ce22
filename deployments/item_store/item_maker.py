"""Computes items or finds them in a cache: content -> processed tensors -> embeddings.

This process holds references only, never the tensors. The caller of a stage owns its results, so cached data outlives
the replica that computed it. The object store keeps one copy a node."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ray import ObjectRef

from raylens.deployments.config import SharedConfig
from raylens.deployments.item_store.encoder_choice import EncoderPlace, cheapest
from raylens.deployments.item_store.item_states import (
    ContentMissingError,
    ItemOrder,
    ItemTrace,
    MadeItem,
    OnPending,
    StoredItem,
)
from raylens.deployments.metrics.definitions import CacheMetrics, ItemMetrics
from raylens.deployments.ray_internals.calls_ahead import results_of
from raylens.deployments.ray_internals.handles import has_running_replica
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import in_request
from raylens.deployments.stages.stage_calls import (
    CallFailedError,
    StageCalls,
    StageHandles,
    StageUnavailableError,
    call_of,
    has_result,
)
from raylens.deployments.tracing.spans import OpenSpan, Spans
from raylens.deployments.wire.stage_messages import EmbeddingInfo, ItemJob
from raylens.preprocess.cache import ItemCache
from raylens.preprocess.schema import ItemInfo

logger = logging.getLogger(f"ray.serve.{__name__}")

ResultT = TypeVar("ResultT")
OnTaken = Callable[[ObjectRef], None]
"""Gets a reference to a stage's pending result once a replica has taken the call."""


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
        self._contents: dict[str, dict[object, bytes | PackedReference]] = {}
        """Per item in progress: the contents that its open orders brought, without lost ones."""
        self._processors = {model: own.preprocess.process_item for model, own in stages.items()}
        self._encoders = {
            model: [EncoderPlace(stage, one, partial(has_running_replica, one)) for stage, one in own.encoders.items()]
            for model, own in stages.items()
        }
        self._calls = calls
        self._metrics = metrics
        self.processed = ItemCache[StoredItem, ObjectRef](
            config.processor_cache_bytes // config.shards, partial(_count_eviction, metrics.mm_cache)
        )
        self.embeddings = ItemCache[StoredItem, StoredItem](
            config.embedding_cache_bytes // config.shards, partial(_count_eviction, metrics.encoder_cache)
        )

    async def processed_of(self, order: ItemOrder) -> MadeItem:
        """Returns the processed item without embeddings. Raises like `embeddings_of`."""
        trace = ItemTrace()
        with self._watched(order, trace) as span:
            order = replace(order, context=span.context)
            processed = self._with_content(
                order, lambda: self._calls.send("preprocess", lambda: self._processed(order, trace))
            )
            return MadeItem(await processed, trace)

    async def embeddings_of(self, order: ItemOrder, on_pending: OnPending) -> MadeItem:
        """Returns the item with its embeddings. `on_pending` gets it while they are new and pending.

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
        async def create(announce: OnPending) -> tuple[StoredItem, int]:
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

    async def _make(self, order: ItemOrder, trace: ItemTrace, announce: OnPending) -> tuple[StoredItem, int]:
        """Returns the item with its embeddings, and their size in bytes. Repeats the calls without a result after a
        replica's death or the loss of tensors."""
        attempts = Counter[str]()
        processing: asyncio.Task[StoredItem] | None = None

        async def process_again() -> None:
            nonlocal processing
            self.processed.discard(order.mm_hash)
            processing = None

        try:
            while True:
                tensors: asyncio.Future[ObjectRef] = asyncio.get_running_loop().create_future()
                if processing is None or not has_result(processing):
                    processing = asyncio.create_task(self._processed(order, trace, tensors.set_result))
                try:
                    return await self._make_once(order, trace, processing, tensors, announce)
                except CallFailedError as failed:
                    await self._calls.recover(failed, attempts, process_again)
        finally:
            if processing is not None:
                await _cancelled(processing)

    async def _make_once(
        self,
        order: ItemOrder,
        trace: ItemTrace,
        processing: "asyncio.Task[StoredItem]",
        tensors: "asyncio.Future[ObjectRef]",
        announce: OnPending,
    ) -> tuple[StoredItem, int]:
        """Calls Encode with a reference to `tensors`, before these exist. `processing`: their computation. Raises
        CallFailedError."""
        await asyncio.wait([tensors, processing], return_when=asyncio.FIRST_COMPLETED)
        if order.is_precomputed and (processed := await processing).info.is_encoded:
            return processed, processed.info.num_bytes
        given = tensors.result() if tensors.done() else (await processing).ref
        taken: ObjectRef | None = None

        def tell() -> None:
            if taken is not None and has_result(processing):
                announce(StoredItem(processing.result().info, taken))

        def take(embeddings: ObjectRef) -> None:
            nonlocal taken
            taken = embeddings
            tell()

        processing.add_done_callback(lambda _: tell())
        encoding = asyncio.create_task(self._encode(order, trace, given, take))
        try:
            await asyncio.wait([encoding, processing], return_when=asyncio.FIRST_COMPLETED)
            if not has_result(encoding):
                await processing  # its failure may be the cause
            (embeddings, info), processed = await encoding, await processing
        finally:
            await _cancelled(encoding)
        trace.times += info.times
        self._metrics.object_store_transfer_bytes.inc(processed.info.num_bytes, edge="preprocess_encode")
        self._metrics.object_store_transfer_bytes.inc(info.num_bytes, edge="encode_generate")
        return StoredItem(processed.info, embeddings), info.num_bytes

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

    def evict(self, mm_hash: str, lost: PackedReference) -> None:
        """Evicts an item from both caches after the node with its embeddings `lost` is gone. Keeps an item that was
        recomputed since."""
        entry = self.embeddings.peek(mm_hash)
        if entry is None or PackedReference.of(entry.ref) == lost:
            self.embeddings.discard(mm_hash)
            self.processed.discard(mm_hash)

    def _check_model(self, order: ItemOrder, stage: str) -> None:
        """Raises StageUnavailableError for a model that this shard does not know, during an update that adds or removes
        it."""
        if order.model not in self._processors:
            raise StageUnavailableError(stage, f"the {stage} stage is not available")

    async def _processed(
        self, order: ItemOrder, trace: ItemTrace, on_taken: OnTaken = lambda tensors: None
    ) -> StoredItem:
        async def create(announce: OnTaken) -> tuple[StoredItem, int]:
            with in_request(order.context):
                return await self._process(order, trace, announce)

        processed, trace.was_processed = await self.processed.get_or_create(order.mm_hash, create, on_taken)
        self._metrics.mm_cache.count_query(order.modality, is_hit=trace.was_processed)
        return processed

    async def _process(self, order: ItemOrder, trace: ItemTrace, on_taken: OnTaken) -> tuple[StoredItem, int]:
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
        try:
            with call_of("preprocess"):
                response = self._processors[order.model].remote(job)
                (tensors, _), info = await results_of(response, lambda tensors, _: on_taken(tensors))
        except CallFailedError as failed:
            if failed.is_loss:
                contents.pop(source, None)  # its ingress is gone, and the content with it
                raise ContentMissingError from failed
            raise
        assert isinstance(info, ItemInfo)
        trace.times += info.times
        return StoredItem(info, tensors), info.num_bytes

    async def _encode(
        self, order: ItemOrder, trace: ItemTrace, tensors: ObjectRef, on_taken: OnTaken
    ) -> tuple[ObjectRef, EmbeddingInfo]:
        """Raises CallFailedError."""
        self._check_model(order, "encode")
        encoder = cheapest(self._encoders[order.model], order.num_pixels)
        item_id = f"{order.request_id}-{order.mm_hash}"
        with call_of("encode"), encoder.call(order.num_pixels) as answered:
            response = encoder.encode.remote(item_id, order.modality, tensors, time.time(), order.context)
            (embeddings, _), info = await results_of(response, lambda embeddings, _: on_taken(embeddings))
            assert isinstance(info, EmbeddingInfo)
            answered(info)
        trace.encoded_by = encoder.stage
        return embeddings, info


async def _cancelled(work: "asyncio.Task[Any]") -> None:
    """Cancels the work if it still runs, and waits for its end."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _count_eviction(metrics: CacheMetrics, item: StoredItem) -> None:
    metrics.count_eviction(item.info.modality)
