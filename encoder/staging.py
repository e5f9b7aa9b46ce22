"""Copies items to the device and embeddings back, before and after the computation or beside it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Protocol

import torch

from raylens.encoder.config import EncoderConfig
from raylens.preprocess.schema import ItemTensors

_ALIGNMENT = 64
"""The alignment in bytes of each tensor, a multiple of every dtype's size."""

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
        return [_after(lambda: None, features.to("cpu", copy=True).contiguous()) for features in encode(moved)]


class CudaTransfers:
    """Uploads, computation and downloads on CUDA streams of its own, so that other code in the process may use the GPU,
    too.

    Pinned memory comes from PyTorch's allocator, which reuses a dropped tensor's memory once no copy uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computation, self._uploads, self._downloads = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        # Another stream copied the weights to the device.
        torch.cuda.synchronize(device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns uninitialised host memory for asynchronous copies."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the device, for computations launched later. The caller may drop `host`, but not change
        it."""
        with torch.cuda.stream(self._uploads):
            copy = host.to(self._device, non_blocking=True)
        self._computation.wait_stream(self._uploads)
        # A later upload must not reuse this memory while the computation still reads it.
        copy.record_stream(self._computation)
        return copy

    def compute(self) -> AbstractContextManager[object]:
        """Returns a context. Work launched in it runs after all work of earlier contexts."""
        return torch.cuda.stream(self._computation)

    def download(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        """Copies each source of `copies`, (source, target), to its target in `pinned` memory, after all computation
        launched so far. Returns a function that waits for the copies."""
        # A blocking event, because a busy wait would take a core from other threads.
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
    """Overlaps copies with computation: while a batch is encoded, the next batch is uploaded to the GPU, and the
    previous batch's embeddings are downloaded.

    A batch's tensors are uploaded in one copy from pinned memory. Each item's embeddings are downloaded to separate
    pinned memory."""

    look_ahead = 1

    def __init__(self, transfers: CudaTransfers) -> None:
        self._transfers = transfers

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        moved = self._upload(items, on_host)
        with self._transfers.compute():
            copies = [(features, self._transfers.pinned(features.shape, features.dtype)) for features in encode(moved)]
        wait = self._transfers.download(copies)
        return [_after(wait, target) for _, target in copies]

    def _upload(self, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[ItemTensors]:
        """Returns the items on the device: all tensors but those named `on_host` are views of one copy."""
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
    """Returns the bytes of `whole` from `start` as a tensor of the dtype and shape of `like`."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _after(wait: Callable[[], object], embeddings: torch.Tensor) -> PendingEmbeddings:
    def get() -> torch.Tensor:
        wait()
        return embeddings

    return get


def make_staging(config: EncoderConfig) -> Staging:
    """Returns overlapped staging if tower and projector are on one GPU, and direct staging otherwise.

    Between two devices the host waits within a batch. A plug-in runs on a thread of its own, without the streams of
    overlapped staging."""
    device = torch.device(config.tower.device)
    if config.is_on_one_gpu and config.vision_plugin is None:
        return OverlappedStaging(CudaTransfers(device))
    return DirectStaging(device)
