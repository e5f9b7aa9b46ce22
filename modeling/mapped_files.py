"""Memory that maps the files of a checkpoint."""

import bisect
import ctypes
import mmap
import sys

import torch

_DONT_NEED = 4
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class MappedFiles:
    """The mapped safetensors files of this process, at the moment of creation."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if _LIBC is not None:
            with open("/proc/self/maps") as lines:
                for line in lines:
                    addresses, *_, path = line.rstrip().split(maxsplit=5)
                    if path.endswith(".safetensors"):
                        start, end = (int(address, 16) for address in addresses.split("-"))
                        self._ranges.append((start, end))

    def release(self, tensor: torch.Tensor) -> None:
        """Takes the tensor's pages out of this process's memory if they map a file, unchanged. A later access maps them
        again."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if _LIBC is not None and start < end and self._has(start, end):
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)

    def _has(self, start: int, end: int) -> bool:
        index = bisect.bisect(self._ranges, (start, sys.maxsize)) - 1
        return index >= 0 and self._ranges[index][0] <= start and end <= self._ranges[index][1]
