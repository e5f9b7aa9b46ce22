"""Asynchronous copies between host and device: a step's arrays to the device in one copy, results back to the host."""

from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
_ALIGNMENT = 16
"""Bytes. Each value begins at a multiple, as a separate tensor does, because a compiled kernel may rely on it."""


class HostValues:
    """Arrays of a step for the device: `add` each one, then `upload` once; `values[index]` is then the array on the
    device.

    One copy carries all arrays, because even the smallest copy costs the host some ten microseconds. Each upload
    allocates pinned memory of its own: a copy from other memory would wait for the device's queue, and the device may
    read the memory long after `upload` has returned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[npt.NDArray[Any]] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, array: npt.NDArray[Any]) -> int:
        """Returns the array's index. Its content may not change until `upload`."""
        assert not self._tensors, "what is added behind the upload never reaches the device"
        self._arrays.append(array)
        return len(self._arrays) - 1

    def upload(self) -> None:
        if not self._arrays:
            return
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in self._arrays)]
        # PyTorch's allocator reuses pinned memory only after the device has read it.
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        memory = host.numpy()
        for array, start in zip(self._arrays, starts, strict=False):
            memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = host.to(self._device, non_blocking=True)
        self._tensors = [
            on_device[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
            for array, start in zip(self._arrays, starts, strict=False)
        ]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensors[index]


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array on the device. The host does not wait, and may change the array at once."""
    values = HostValues(device)
    index = values.add(array)
    values.upload()
    return values[index]


class HostCopy:
    """An asynchronous copy of a tensor to the host. `read` waits for this copy, not for work queued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._is_there: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[Any]:
        """Returns the tensor as nested lists."""
        if self._is_there is not None:
            self._is_there.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers
