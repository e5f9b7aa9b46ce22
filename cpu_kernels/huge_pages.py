"""Memory on huge pages, for weights and the KV cache. A step reads them once, and each page of 4 KiB would cost a TLB
miss. Hardware prefetching also stops at the end of a page."""

import mmap
from collections.abc import Iterable

import torch

from raylens.cpu_kernels.madvise import POPULATE_WRITE, madvise

_PAGE = 2 * 2**20
_LINE = 64
_POPULATED_AT_ONCE = 64 * 2**20


class HugePages:
    """Memory for parts of the given sizes in bytes, to be taken in this order. It lives as long as any part."""

    def __init__(self, sizes: Iterable[int]) -> None:
        # Private, because Linux needs another setting for huge pages in shared memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, sum(map(_whole_lines, sizes)) + _PAGE, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._next = -self._bytes.data_ptr() % _PAGE

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns the next `num_bytes`, uint8, zeroed, aligned to a cache line."""
        taken = self._bytes[self._next : self._next + num_bytes]
        assert len(taken) == num_bytes, "more was taken than asked for"
        self._next += _whole_lines(num_bytes)
        return taken

    def populate(self) -> None:
        """Lets the system provide all memory now, not at the first access of each page, where Linux can (5.14)."""
        for start in range(0, len(self._bytes), _POPULATED_AT_ONCE):
            size = min(_POPULATED_AT_ONCE, len(self._bytes) - start)
            madvise(self._bytes.data_ptr() + start, size, POPULATE_WRITE)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
