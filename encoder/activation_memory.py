"""Measures the memory of a forward pass beside weights and inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_activation_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Runs `run` and returns the peak of the bytes that it allocates.

    On a GPU, PyTorch's allocator counts the bytes, kernel workspaces included. On the CPU, the result is the peak of
    the sum of live tensors, taken after each operation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before
    live = _LiveTensors()
    with live:
        run()
    return live.peak_bytes


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations allocate, while they are referenced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in _dense_tensors((args, kwargs))}
        outputs = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        for tensor in _dense_tensors(outputs):
            if _key(tensor) not in given | self._live.keys():
                storage = tensor.untyped_storage()
                self._live[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return outputs


def _dense_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Returns the strided tensors in `tree`. Weights in oneDNN's layout have no storage and are no activations."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
