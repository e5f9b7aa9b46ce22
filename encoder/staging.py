"""Copies items to the device and embeddings back."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from raylens.preprocess.schema import ItemTensors

Encode = Callable[[list[ItemTensors]], list[torch.Tensor]]
PendingEmbeddings = Callable[[], torch.Tensor]
"""Waits for an item's embeddings and returns them: (num_embeds, embedding_size), on the CPU, owning their memory."""


class Staging(Protocol):
    @property
    def look_ahead(self) -> int:
        """Returns the number of launched batches that may still run when the engine's step returns."""

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        """Copies the items to the device, except for the tensors named `on_host`, and calls `encode` with them.

        Returns a function for each item, which waits for its embeddings. Passes on errors of `encode`."""


class DirectStaging:
    """Copies before and after the computation: the embeddings are on the CPU when `run` returns."""

    look_ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        moved = [
            {name: tensor if name in on_host else tensor.to(self._device) for name, tensor in item.items()}
            for item in items
        ]
        # A copy, because a view would keep the whole batch's memory, and send it to another process.
        return [_ready(features.to("cpu", copy=True).contiguous()) for features in encode(moved)]


def _ready(embeddings: torch.Tensor) -> PendingEmbeddings:
    return lambda: embeddings
