"""Copies beside the computation: a batch comes to the GPU while the one before it is encoded, whose embeddings leave
while the next is encoded."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Protocol

import torch

from encoder.staging import Encode, PendingEmbeddings
from preprocess.schema import ItemTensors

_ALIGNMENT = 64
"""In bytes, of each tensor's beginning: a multiple of every dtype's size."""


class Transfers(Protocol):
    """What a device has to be able to do, each beside the others."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host that the device copies from and to by itself, not initialized."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device, for what is computed from now on. `host` may be dropped, but not be changed."""

    def compute(self) -> AbstractContextManager[object]:
        """What is launched inside runs behind all that was launched inside before."""

    def download(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        """Copies to `pinned` memory what was computed up to now, (source, target) each; returns what waits for it."""


class CudaTransfers:
    """Streams of its own: it may share the GPU, and the process, with others. The memory that it pins comes from
    PyTorch's allocator, which keeps what is dropped for the next ones, once no copy is at work on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computation, self._uploads, self._downloads = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        # Weights were brought there on another stream.
        torch.cuda.synchronize(device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._uploads):
            copy = host.to(self._device, non_blocking=True)
        self._computation.wait_stream(self._uploads)
        # The next upload is not to get its memory while it is still read.
        copy.record_stream(self._computation)
        return copy

    def compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._computation)

    def download(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        # Others need the processor that waiting in a loop would take.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._downloads.wait_stream(self._computation)
        with torch.cuda.stream(self._downloads):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._downloads)
            done.record(self._downloads)
        synchronize: Callable[[], object] = done.synchronize
        return synchronize


class OverlappedStaging:
    """All tensors of a batch in one upload, from pinned memory; each item's embeddings back to pinned memory of their
    own."""

    look_ahead = 1

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        moved = self._upload(items, on_host)
        with self._transfers.compute():
            copies = [(features, self._transfers.pinned(features.shape, features.dtype)) for features in encode(moved)]
        wait = self._transfers.download(copies)
        return [_after(wait, target) for _, target in copies]

    def _upload(self, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[ItemTensors]:
        """The items with all but what stays on the host as views of one copy."""
        places = [(place, name) for place, item in enumerate(items) for name in item if name not in on_host]
        tensors = [items[place][name] for place, name in places]
        starts = list(accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0))
        host = self._transfers.pinned((starts[-1],), torch.uint8)
        for tensor, start in zip(tensors, starts, strict=False):
            _view(host, start, tensor).copy_(tensor)
        device = self._transfers.upload(host)
        moved = [dict(item) for item in items]
        for (place, name), tensor, start in zip(places, tensors, starts, strict=False):
            moved[place][name] = _view(device, start, tensor)
        return moved


def _view(whole: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of `whole` from `start` on as a tensor of the dtype and the shape of `like`."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _after(wait: Callable[[], object], embeddings: torch.Tensor) -> PendingEmbeddings:
    def get() -> torch.Tensor:
        wait()
        return embeddings

    return get
