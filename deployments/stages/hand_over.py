"""Hands item embeddings from Encode to the language model, each once it is ready.

The ingress calls Generate while Encode still works. Generate gets a reference to each item's embeddings, possibly
pending, and meanwhile computes the prompt up to the first pending item."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.server_log import process_name
from raylens.deployments.wire.tensor_wire import PackedTensor
from raylens.preprocess.schema import ProcessedPrompt, StageTime

if TYPE_CHECKING:
    import torch


class EmbeddingsLostError(RuntimeError):
    """An item's embeddings did not arrive: the encoding replica failed, or the node that held them is gone."""


class PromptLostError(RuntimeError):
    """A long prompt did not arrive: Preprocess failed, or the ingress or the node that held the prompt is gone."""


async def received_prompt(ref: PackedReference) -> ProcessedPrompt:
    """Returns the prompt that Preprocess renders. Raises PromptLostError."""
    prompt: ProcessedPrompt = await _received(ref, PromptLostError)
    return prompt


async def _received(ref: PackedReference, lost: Callable[[str], Exception]) -> Any:
    """Returns the object, or raises `lost` of the error's name."""
    try:
        return await ref.unpack()
    except Exception as error:
        # The ingress gets the error from its own call of the stage. Chained here, this one would arrive wrapped.
        raise lost(type(error).__name__) from None


@dataclass(frozen=True, slots=True)
class ItemEmbeddings:
    """A reference to a PackedTensor. `is_pending`: Encode is computing it."""

    ref: PackedReference
    is_pending: bool


@dataclass(slots=True)
class HandOver:
    """Receives the embeddings of one request. `rendered_at`: wall time when the prompt was ready; no call precedes it.
    `count_remote_bytes` gets the bytes of each tensor from another node. `stage` copies embeddings to the engine's
    input memory, on a thread; None: no copy. `transfer`: the slowest transfer of received embeddings."""

    items: list[ItemEmbeddings]
    rendered_at: float
    count_remote_bytes: Callable[[int], None] = lambda num_bytes: None
    stage: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    transfer: StageTime = field(init=False)

    def __post_init__(self) -> None:
        self.transfer = StageTime("transfer_embeddings", self.rendered_at, 0.0, process_name())

    async def ready(self) -> "list[torch.Tensor | None]":
        """Returns each item's embeddings, (num_embeds, embedding_size), or None while the item is being encoded."""
        indices = [index for index, item in enumerate(self.items) if not item.is_pending]
        received = await asyncio.gather(*map(self._receive, indices))
        found = dict(zip(indices, received, strict=True))
        return [found.get(index) for index in range(len(self.items))]

    def pending(
        self, set_embeddings: "Callable[[str, int, torch.Tensor], None]"
    ) -> list[Callable[[], Awaitable[Callable[[str], None]]]]:
        """Returns a coroutine function per pending item. It awaits the embeddings and returns their setter."""

        async def receive(index: int) -> Callable[[str], None]:
            embeddings = await self._receive(index)
            return lambda request_id: set_embeddings(request_id, index, embeddings)

        return [partial(receive, index) for index, item in enumerate(self.items) if item.is_pending]

    async def _receive(self, index: int) -> "torch.Tensor":
        ref = self.items[index].ref
        packed: PackedTensor = await _received(ref, lambda name: EmbeddingsLostError(f"item {index}: {name}"))
        sent_at = max(self.rendered_at, packed.packed_at)
        if (seconds := time.time() - sent_at) > self.transfer.seconds:
            self.transfer = replace(self.transfer, started_at=sent_at, seconds=seconds)
        self.count_remote_bytes(packed.num_remote_bytes)
        embeddings = packed.unpack()
        return embeddings if self.stage is None else await asyncio.to_thread(self.stage, embeddings)
