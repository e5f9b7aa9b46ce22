"""The number of threads of the kernels, which leaves cores to other busy processes.

On a core shared with another process, compute-bound work waits for its slowest thread and slows the other process down.
Two figures together show contended cores: involuntary context switches, and a CPU time below the elapsed time. Neither
suffices alone. Short tasks of other processes cause many switches but take little time, and CPU time is also low while
a part of the work has only one thread. The system's idle time shows free cores."""

import math
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MOST = 16
_of_thread = threading.local()
_SWITCHES_PER_SECOND = 60.0
"""Of a thread. An idle machine has about 15, caused by the system itself."""
_COMPUTING_SHARE = 0.65
"""Of the time of all threads. Two threads on two cores compute for 0.7 to 0.97 of a step beside short tasks of other
processes, and for 0.3 to 0.5 beside another process's busy thread."""
_WATCH_SECONDS = 0.1
"""The interval over which idle time is measured; the system counts it in hundredths of a second."""
_IDLE_SHARE = 0.6
"""The idle share of a free core. With less, the work would take cores that it must soon leave again."""
_STAT = Path("/proc/stat")


def set_num_threads(number: int) -> None:
    """Sets the number of threads, the caller included, for later kernel calls of this thread."""
    _of_thread.number = number


def num_threads() -> int:
    """Returns this thread's number from `set_num_threads`, or else PyTorch's number of threads."""
    number: int | None = getattr(_of_thread, "number", None)
    return torch.get_num_threads() if number is None else number


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Lets this thread's kernel calls within this context use all usable cores."""
    before: int | None = getattr(_of_thread, "number", None)
    _of_thread.number = usable_cores()
    try:
        yield
    finally:
        _of_thread.number = before


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


class ThreadBackoff:
    """The number of threads for one kind of work, from 1 to `most`: halved when cores are contended, doubled when cores
    are free."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = most
        self._num_switches = 0
        self._cpu_seconds = 0.0
        self._watched_since = 0.0
        self._idle_before = 0.0

    def next_number(self) -> int:
        """Returns the number of threads for the next piece of work. Report its duration to `note`."""
        if self._number < self._most:
            self._take_free_cores()
        self._num_switches, self._cpu_seconds = _involuntary_switches(), process_time()
        return self._number

    def note(self, seconds: float) -> None:
        """Records the duration of the work since `next_number`."""
        if self._number == 1:
            return
        thread_seconds = self._number * seconds
        were_taken = _involuntary_switches() - self._num_switches > _SWITCHES_PER_SECOND * thread_seconds
        if were_taken and process_time() - self._cpu_seconds < _COMPUTING_SHARE * thread_seconds:
            self._number //= 2
            self._watch()

    def _take_free_cores(self) -> None:
        watched = perf_counter() - self._watched_since
        if watched < _WATCH_SECONDS:
            return
        num_free = (_idle_core_seconds() - self._idle_before) / watched
        more = min(self._most, 2 * self._number)
        if num_free >= _IDLE_SHARE * (more - self._number):
            self._number = more
        self._watch()

    def _watch(self) -> None:
        self._watched_since, self._idle_before = perf_counter(), _idle_core_seconds()


def _involuntary_switches() -> int:
    """Returns the number of this process's involuntary context switches so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _idle_core_seconds() -> float:
    """Returns the idle time of all of the machine's cores. Where the system does not tell, all cores count as idle."""
    try:
        ticks = _STAT.read_bytes().split(maxsplit=6)
    except OSError:
        return perf_counter() * (os.cpu_count() or 1)
    return (int(ticks[4]) + int(ticks[5])) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for a disk
