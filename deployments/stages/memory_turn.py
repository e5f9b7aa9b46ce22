"""Makes processes that share a GPU plan its memory in turn. A stage measures the memory of its largest step and the
memory that others leave; two at a time would count memory that the other is about to allocate or free."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raylens.deployments.session_folder import session_folder

logger = logging.getLogger(f"ray.serve.{__name__}")

_SLOW_SECONDS = 1.0


@contextmanager
def memory_turn(device: str) -> Iterator[None]:
    """Wraps a stage's startup until its memory is planned. On a GPU, waits for other processes on the same one."""
    import torch

    if torch.device(device).type != "cuda":
        yield
        return
    identity = torch.cuda.get_device_properties(torch.device(device)).uuid
    with turn(session_folder() / f"raylens-gpu-{identity}.lock"):
        yield


@contextmanager
def turn(file: Path) -> Iterator[None]:
    """Holds the file's lock. The system releases it however the process ends."""
    started = time.monotonic()
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (seconds := time.monotonic() - started) > _SLOW_SECONDS:
            logger.info("waited %.1f s for another process that planned the memory of this GPU", seconds)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child would keep the lock
