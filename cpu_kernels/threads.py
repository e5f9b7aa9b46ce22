"""How many threads the kernels use."""

import math
import os
import threading
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MOST = 16
_of_thread = threading.local()


def set_num_threads(number: int) -> None:
    """Sets the number of threads, the calling one included, for kernels that this thread calls from now on."""
    _of_thread.number = number


def num_threads() -> int:
    """Returns what this thread has set by `set_num_threads`, or else PyTorch's number of threads."""
    number: int | None = getattr(_of_thread, "number", None)
    return torch.get_num_threads() if number is None else number


def usable_cores() -> int:
    """Returns how many threads are worth starting: one for each core that this process may use, but 16 at most. A
    container's share of processor time counts as so many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(), _MOST))


def _quota() -> int:
    """Returns the cores' worth of time that the process' control group has, rounded up (Linux, cgroup v2)."""
    try:
        time, period = _QUOTA.read_text().split()
        return math.ceil(int(time) / int(period))
    except (OSError, ValueError):  # there is no such file, or the time is "max"
        return _MOST
