"""Memory on huge pages, for weights: a step reads all of them, and every page of 4 KiB would cost a look-up."""

import mmap
from collections.abc import Iterable

import torch

_PAGE = 2 * 2**20
_LINE = 64


class HugePages:
    """Memory for parts of the given sizes in bytes, which are taken in this order. It lives as long as one of them."""

    def __init__(self, sizes: Iterable[int]) -> None:
        memory = mmap.mmap(-1, sum(map(_whole_lines, sizes)) + _PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._next = -self._bytes.data_ptr() % _PAGE

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns the next `num_bytes`, uint8, zero, at the start of a cache line."""
        taken = self._bytes[self._next : self._next + num_bytes]
        assert len(taken) == num_bytes, "more was taken than asked for"
        self._next += _whole_lines(num_bytes)
        return taken


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
