"""How items come to the device and embeddings back."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from preprocess.schema import ItemTensors

Encode = Callable[[list[ItemTensors]], list[torch.Tensor]]
PendingEmbeddings = Callable[[], torch.Tensor]
"""Waits for an item's embeddings and returns them, (num_embeds, embedding_size) on the CPU in memory of their own."""


class Staging(Protocol):
    @property
    def look_ahead(self) -> int:
        """How many batches may run while another is made ready."""

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        """Gives the items to `encode` on the device, but for the tensors named `on_host`. What that raises is raised
        here."""


class DirectStaging:
    """Copies before and after the computation: all is there when `run` returns."""

    look_ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        moved = [
            {name: tensor if name in on_host else tensor.to(self._device) for name, tensor in item.items()}
            for item in items
        ]
        # A view would ship and keep the whole batch.
        return [_ready(features.to("cpu", copy=True).contiguous()) for features in encode(moved)]


def _ready(embeddings: torch.Tensor) -> PendingEmbeddings:
    return lambda: embeddings
