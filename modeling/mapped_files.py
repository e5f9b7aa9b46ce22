"""Memory that maps the files of a checkpoint."""

import bisect
import mmap
import sys
from pathlib import Path

import torch

from raylens.cpu_kernels.madvise import DONT_NEED, madvise

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The files that this process maps at the moment of creation."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            addresses, _, _, _, _, *path = line.split(maxsplit=5)
            # By no suffix: in a cache of the hub the weights are links to files without one.
            if path and Path(path[0]).is_file():
                start, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((start, end))

    def release(self, tensor: torch.Tensor) -> None:
        """Takes the tensor's pages out of this process's memory if they map a file, unchanged. A later access maps them
        again."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and self.hold(tensor):
            madvise(start, end - start, DONT_NEED)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor's memory maps a file."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        index = bisect.bisect(self._ranges, (start, sys.maxsize)) - 1
        return index >= 0 and self._ranges[index][0] <= start and end <= self._ranges[index][1]
