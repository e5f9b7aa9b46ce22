"""Gives the memory that large pictures took back to the operating system."""

import ctypes
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Makes the C library return freed memory to the system. After one picture of 7000 x 7000 it keeps some 400 MB,
    which most later pictures do not need. This takes some milliseconds."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)
