"""Leaves cores to other processes that want them.

Work that computes more than it reads is done sooner by several threads, if each has a core. A core that another process
wants is another matter: the work waits until the thread on it has finished what it has begun, and the other process has
less of the core meanwhile. Two processes with two threads each on two cores did a fifth less than with one thread each,
and the slowest steps took three times as long.

The system tells when a core was wanted: it has taken cores from threads that were not done (involuntary context
switches), and the threads have computed for less time than the work took. Either alone says little. Short tasks of
other processes take a core hundreds of times a second, for a few hundredths of the time. And threads also compute for
less time where a part of the work is for one of them. The system also tells how long cores were idle.
"""

import os
import resource
import time
from pathlib import Path

_SWITCHES_PER_SECOND = 60.0
"""Of a thread. On an idle machine there are about 15, for what the system itself does."""
_COMPUTING_SHARE = 0.65
"""Of the time of all threads. Two threads on two cores compute for 0.7 to 0.97 of a step beside short tasks of others,
and for 0.3 to 0.5 beside a thread of another process that computes, too."""
_WATCH_SECONDS = 0.1
"""How long cores are watched for idle time, which the system counts in hundredths of a second."""
_IDLE_SHARE = 0.6
"""Of that time, for a core to be free. Else the work would try cores that it had to leave again."""
_STAT = Path("/proc/stat")


class ThreadBackoff:
    """The number of threads for one kind of work: half as many as before when the cores turn out to be wanted, twice as
    many when cores have become free, between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = most
        self._num_switches = 0
        self._cpu_seconds = 0.0
        self._watched_since = 0.0
        self._idle_before = 0.0

    def next_number(self) -> int:
        """Returns the number for the next piece of work. Tell `note` how long it took."""
        if self._number < self._most:
            self._take_free_cores()
        self._num_switches, self._cpu_seconds = _involuntary_switches(), _cpu_seconds()
        return self._number

    def note(self, seconds: float) -> None:
        """Takes how long the work took since `next_number`."""
        if self._number == 1:
            return
        thread_seconds = self._number * seconds
        were_taken = _involuntary_switches() - self._num_switches > _SWITCHES_PER_SECOND * thread_seconds
        if were_taken and _cpu_seconds() - self._cpu_seconds < _COMPUTING_SHARE * thread_seconds:
            self._number //= 2
            self._watch()

    def _take_free_cores(self) -> None:
        watched = _now() - self._watched_since
        if watched < _WATCH_SECONDS:
            return
        num_free = (_idle_core_seconds() - self._idle_before) / watched
        more = min(self._most, 2 * self._number)
        if num_free >= _IDLE_SHARE * (more - self._number):
            self._number = more
        self._watch()

    def _watch(self) -> None:
        self._watched_since, self._idle_before = _now(), _idle_core_seconds()


def _now() -> float:
    return time.perf_counter()


def _cpu_seconds() -> float:
    """Returns for how long this process's threads have computed, all together."""
    return time.process_time()


def _involuntary_switches() -> int:
    """Returns how often this process's threads have lost a core, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _idle_core_seconds() -> float:
    """Returns how long the machine's cores have been idle, all together. Where the system does not tell, they count as
    idle all the time."""
    try:
        ticks = _STAT.read_bytes().split(maxsplit=6)
    except OSError:
        return _now() * (os.cpu_count() or 1)
    return (int(ticks[4]) + int(ticks[5])) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for a disk
