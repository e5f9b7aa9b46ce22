"""Tells Linux how this process uses its memory."""

import ctypes
import sys

DONT_NEED, POPULATE_WRITE = 4, 23
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def madvise(address: int, num_bytes: int, advice: int) -> None:
    """Gives an advice about whole pages, see madvise(2). Other threads of Python run meanwhile, unlike during
    `mmap.madvise`. Does nothing on other systems, or where Linux does not know the advice."""
    if _LIBC is not None:
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
