"""The number of threads of the kernels."""

import math
import os
import threading
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MOST = 16
_of_thread = threading.local()


def set_num_threads(number: int) -> None:
    """Sets the number of threads, the caller included, for later kernel calls of this thread."""
    _of_thread.number = number


def num_threads() -> int:
    """Returns this thread's number from `set_num_threads`, or else PyTorch's number of threads."""
    number: int | None = getattr(_of_thread, "number", None)
    return torch.get_num_threads() if number is None else number


def usable_cores() -> int:
    """Returns the number of cores that this process may use, at most 16. A container's CPU quota limits it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(), _MOST))


def _quota() -> int:
    """Returns the CPU quota of the process's control group in cores, rounded up (Linux, cgroup v2)."""
    try:
        time, period = _QUOTA.read_text().split()
        return math.ceil(int(time) / int(period))
    except (OSError, ValueError):  # no such file, or the time is "max"
        return _MOST
