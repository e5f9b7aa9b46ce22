"""Controls which freed memory a process keeps and which it returns to the operating system."""

import ctypes
import sys

MALLOC_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}
"""glibc settings, read at process start: the process keeps the freed memory of bodies and images for reuse. By default
glibc returns that memory to the kernel. Mapping five megabytes again takes 4 ms, on virtual machines sometimes 100 ms,
and blocks the ingress."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Makes the C library return freed memory to the system, within some milliseconds. The library keeps some 400 MB
    after an image of 7000 x 7000, more than most later images need."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc only, not musl
    if trim is not None:
        trim(0)
