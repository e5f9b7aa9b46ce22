"""Interrupts a thread that computes for too long."""

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_POLL_SECONDS = 0.25
_T = TypeVar("_T")


class TimeLimitError(BaseException):
    """The time is up. Not an Exception, so that the work itself does not catch it."""


@dataclass(slots=True)
class _Work:
    """`clock`: of the thread's CPU time. `end`: the time on it at which the thread gets the next error."""

    thread: int
    clock: int
    end: float


class TimeLimit:
    """Bounds the CPU time of work on the calling thread, independent of the machine's load.

    Python raises the error between two bytecodes, so a single call of C code runs to its end. It drops the error where
    it comes in a finalizer or a callback of the garbage collector. The thread then gets another.

    One thread at a time may use a TimeLimit. A watcher thread checks the clock, so that `run` itself takes only some
    microseconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._work: _Work | None = None
        self._watched: _Work | None = None
        """What the watcher may be raising an error in. No lock: an error could come while the thread holds it."""
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="time-limit", daemon=True).start()

    def run(self, work: Callable[[], _T]) -> _T:
        """Returns what `work` returns. Raises TimeLimitError after `seconds` of the thread's CPU time."""
        thread = threading.get_ident()
        begun = _Work(thread, time.pthread_getcpuclockid(thread), time.thread_time() + self.seconds)
        self._work = begun
        try:
            return work()
        finally:
            try:
                self._end(begun)
            except TimeLimitError:
                self._end(begun)  # the next error is a quarter of a second of CPU time away

    def _end(self, work: _Work) -> None:
        """No error comes after this."""
        self._work = None
        while self._watched is work:
            time.sleep(0)
        _raise_in(work.thread, None)

    def end_overdue(self) -> None:
        """Raises TimeLimitError in the thread of overdue work."""
        self._watched = work = self._work
        # OSError: the thread has ended since.
        with contextlib.suppress(OSError):
            if work is not None and (now := time.clock_gettime(work.clock)) > work.end and self._work is work:
                work.end = now + _POLL_SECONDS
                _raise_in(work.thread, TimeLimitError)
        self._watched = None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Sets the error that the thread raises next. None: takes back one that it has not raised yet."""
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


def _watch(reference: "weakref.ref[TimeLimit]") -> None:
    while (limit := reference()) is not None:
        limit.end_overdue()
        del limit  # the watcher must not keep it alive
        time.sleep(_POLL_SECONDS)
