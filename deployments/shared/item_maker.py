"""Makes items, or finds them in a cache: content -> processed tensors -> embeddings, the tensors by reference only.

The tensors never enter this process. What a stage returns belongs to the process that called the stage. The cached data
lies in the object store, one copy a node, and outlives the replica that made it."""

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from ray import ObjectRef

from deployments.config import SharedConfig
from deployments.metrics.definitions import CacheMetrics, ItemMetrics
from deployments.shared.encoder_choice import cheapest, places_of
from deployments.shared.in_the_making import Announce, InTheMaking
from deployments.shared.item_states import (
    ContentMissingError,
    ItemOrder,
    ItemTrace,
    MadeItem,
    OnPending,
    PendingItem,
    StoredItem,
)
from deployments.shared.stage_calls import StageCalls, StageUnavailableError, objects_of, with_pending
from deployments.stages.stage_handles import StageHandles
from deployments.stages.stage_messages import EmbeddingInfo, ItemJob
from preprocess.cache import ItemCache
from preprocess.schema import ItemInfo

ItemProcessing = InTheMaking[PendingItem, StoredItem]
StoredItems = ItemCache[StoredItem, PendingItem]


class ItemMaker:
    """One shard of the items: both caches, and the calls that fill them. Equal items that are ordered together are made
    once. All models share the caches; each has stages of its own."""

    def __init__(
        self,
        config: SharedConfig,
        stages: Mapping[str, StageHandles],
        calls: StageCalls,
        metrics: ItemMetrics,
    ) -> None:
        """`stages`: those of each model, by the `model` of its items' orders."""
        self._stages = stages
        self._encoders = {model: places_of(own) for model, own in stages.items()}
        self._calls = calls
        self._metrics = metrics
        self.processed = _cache(config.processor_cache_bytes // config.shards, metrics.mm_cache)
        self.embeddings = _cache(config.embedding_cache_bytes // config.shards, metrics.encoder_cache)

    async def processed_of(self, order: ItemOrder) -> MadeItem:
        """Returns the item processed but not encoded. Raises like `embeddings_of`."""
        trace = ItemTrace()
        return MadeItem(await self._processed(order, trace), trace)

    async def embeddings_of(self, order: ItemOrder, on_pending: OnPending) -> MadeItem:
        """Returns the item with its embeddings. If they do not exist yet, `on_pending` gets the item as soon as a
        replica of Preprocess has taken it, and again as soon as a replica of Encode has. It gets the item once more
        each time that another replica makes it because the first one died.

        Raises InvalidRequestError, a StageError, or ContentMissingError.
        """
        trace, is_own = ItemTrace(), False

        async def create(announce: Announce[PendingItem]) -> tuple[StoredItem, int]:
            nonlocal is_own
            is_own = True
            processing = ItemProcessing(
                lambda note: self._processed(order, trace, note),
                lambda processed: PendingItem(processed.info, processed.ref),
                lambda pending: announce(PendingItem(pending.info, None)),
            )
            async with aclosing(processing):
                if order.is_precomputed and (processed := await processing.finished()).info.is_encoded:
                    return processed, processed.info.num_bytes
                return await self._encode_item(order, trace, processing, announce)

        while True:
            try:
                stored, trace.was_encoded = await self.embeddings.get_or_create(order.mm_hash, create, on_pending)
            except ContentMissingError:
                if order.content is None or is_own:
                    raise
                # The attempt that failed was for an order without content.
            else:
                self._metrics.encoder_cache.count_query(order.modality, is_hit=trace.was_encoded)
                return MadeItem(stored, trace)

    def forget(self, mm_hash: str, lost: ObjectRef) -> None:
        """Drops an item from both caches, because the node that held its embeddings `lost` is gone. If it has been made
        anew since, it stays."""
        entry = self.embeddings.peek(mm_hash)
        if entry is None or entry.ref == lost:
            self.embeddings.discard(mm_hash)
            self.processed.discard(mm_hash)

    def _check_model(self, order: ItemOrder, stage: str) -> None:
        """Raises StageUnavailableError for a model that this shard has not heard of, which an update brings or takes
        away."""
        if order.model not in self._stages:
            raise StageUnavailableError(stage, f"the {stage} stage is not available")

    async def _processed(
        self, order: ItemOrder, trace: ItemTrace, on_pending: Announce[PendingItem] = lambda pending: None
    ) -> StoredItem:
        processed, trace.was_processed = await self.processed.get_or_create(
            order.mm_hash, lambda announce: self._process(order, trace, announce), on_pending
        )
        self._metrics.mm_cache.count_query(order.modality, is_hit=trace.was_processed)
        return processed

    async def _process(
        self, order: ItemOrder, trace: ItemTrace, announce: Announce[PendingItem]
    ) -> tuple[StoredItem, int]:
        if order.content is None:
            raise ContentMissingError
        job = ItemJob(
            order.modality,
            order.content,
            order.num_pixels,
            order.num_in_prompt,
            order.options,
            order.is_precomputed,
        )
        # The same item goes to the same replica, because that node has what the item needs.
        self._check_model(order, "preprocess")
        preprocess = self._stages[order.model].preprocess
        process_item = preprocess.options(stream=True, session_id=order.mm_hash).process_item

        async def call() -> tuple[ObjectRef, Any]:
            (tensors, _), info = await objects_of(
                process_item.remote(job), 2, lambda tensors, info: announce(PendingItem(info, tensors))
            )
            return tensors, info

        async def give_up() -> None:
            raise ContentMissingError  # the content has gone with the ingress that sent it

        tensors, info = await self._calls.send("preprocess", call, give_up)
        assert isinstance(info, ItemInfo)
        trace.stage_seconds |= {"media_decode": info.decode_seconds, "processor": info.process_seconds}
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
            ref = (await processing.pending()).ref
            assert ref is not None, "an item is processed once there are references to its metadata and its tensors"
            return ref

        async def encode_tensors(tensors: ObjectRef) -> tuple[ObjectRef, Any]:
            encoder = cheapest(encoders, order.num_pixels)
            encode = encoder.handle.options(stream=True, session_id=order.mm_hash).encode
            with encoder.call(order.num_pixels) as answered:
                response = encode.remote(item_id, order.modality, tensors, time.time())
                (embeddings, _), info = await objects_of(response, 2, announce_embeddings)
                assert isinstance(info, EmbeddingInfo)
                answered(info)
            trace.encoded_by = encoder.stage
            return embeddings, info

        async def process_again() -> None:
            self.processed.discard(order.mm_hash)
            processing.start()

        embeddings, info = await self._calls.send(
            "encode", lambda: with_pending(tensors, processing.finished, encode_tensors), process_again
        )
        assert isinstance(info, EmbeddingInfo)
        processed = await processing.finished()
        trace.stage_seconds |= {
            "transfer_pixels": info.transfer_seconds,
            "encode_queue": info.queue_seconds,
            "encode": info.encode_seconds,
        }
        self._metrics.object_store_transfer_bytes.inc(processed.info.num_bytes, edge="preprocess_encode")
        self._metrics.object_store_transfer_bytes.inc(info.num_bytes, edge="encode_generate")
        return StoredItem(processed.info, embeddings), info.num_bytes


def _cache(capacity_bytes: int, metrics: CacheMetrics) -> StoredItems:
    return StoredItems(capacity_bytes, lambda item: metrics.count_eviction(item.info.modality))
