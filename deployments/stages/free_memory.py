"""Which freed memory a process keeps, and which it gives back to the operating system."""

import ctypes
import sys

MALLOC_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}
"""Settings of glibc, which it reads when a process starts: it keeps the memory of bodies and pictures, to be used
again. By default that memory goes back to the kernel each time. Getting five megabytes again, page by page, takes 4 ms,
on virtual machines sometimes 100. Meanwhile the ingress answers no other request."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Makes the C library return freed memory to the system. After one picture of 7000 x 7000 it keeps some 400 MB,
    which most later pictures do not need. This takes some milliseconds."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)
