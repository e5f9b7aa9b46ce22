"""Sets up a stage's process: memory, garbage collection, priority, torch and the CPU kernels."""

import ctypes
import gc
import logging
import os
import sys

logger = logging.getLogger(f"ray.serve.{__name__}")

MALLOC_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}
"""glibc settings, read at process start: the process keeps freed memory for reuse. By default glibc returns it to the
kernel; mapping five megabytes again blocks the ingress for 4 ms, on virtual machines sometimes for 100 ms."""
PREPROCESS_NICENESS = 15
"""For all threads of the replica: an item thread of its own niceness held up the interpreter for up to 0.3 s. Beside
large images, another client's p99 of time to first token was 165 to 227 ms with 5 or 10, and 118 to 134 ms with 15."""
ENCODER_NICENESS = 10  # with 5, one in ten prefill steps beside the encoder took 1.5 times the median
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Returns freed memory to the system, within milliseconds: 400 MB after an image of 7000 x 7000."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc only, not musl
    if trim is not None:
        trim(0)


def end_startup() -> None:
    """Returns the memory that startup needed to the system, and excludes all live objects from garbage collection.

    The libraries create some 136,000 objects in an ingress, and more with torch. A full collection over them blocks the
    process for a tenth of a second, and Ray triggers one in every process of a node whose object store fills."""
    gc.collect()
    gc.freeze()
    give_back_free_memory()


def give_way_to_answers(niceness: int) -> None:
    """Lowers the priority of this thread and of threads it starts later, see nice(1). Generate, the ingress, HAProxy
    and Ray's own threads of a stage keep theirs: decoding and answering run before image work."""
    os.nice(niceness)


def set_up_torch(num_cpus: float) -> None:
    """Limits torch's threads to the replica's reserved CPUs. Call it before the import of torch or transformers."""
    prepare_torch()
    import torch

    torch.set_num_threads(max(1, int(num_cpus)))


def prepare_torch() -> None:
    """Makes torchvision importable and idle torch threads sleep. Call it before the import of torch or transformers.

    By default, the threads spin for a millisecond after each operation and starve the threads of Raylens' own kernels:
    a vision tower took 1.7 times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    from raylens.modeling.torchvision_build import make_importable

    make_importable()


def kernels_in_use(device: str) -> dict[str, str]:
    """Returns an entry for `/health`: the library of CPU kernels, or why it is missing. Empty on another device."""
    if device != "cpu":
        return {}
    from raylens.cpu_kernels.library import kernel_library, why_missing

    library = kernel_library()
    if library is not None:
        return {"cpu_kernels": library.build}
    logger.warning("Raylens' kernels for the CPU are not in use: %s. PyTorch computes, more slowly.", why_missing())
    return {"cpu_kernels": f"none: {why_missing()}"}
