"""Gives the memory that large pictures took back to the operating system."""

import ctypes
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Has the C library return what it keeps for itself after blocks are freed: for one picture of 7000 x 7000 that
    is some 400 MB, and nothing ever asks for so much again. Takes some milliseconds."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)
