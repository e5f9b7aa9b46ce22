"""Interrupts a thread that computes for too long."""

import contextlib
import ctypes
import threading
import time
import weakref

_POLL_SECONDS = 0.25


class TimeLimitError(BaseException):
    """The time is up. Not an Exception, so that the work itself does not catch it."""


class TimeLimit:
    """`with time_limit:` raises TimeLimitError in the block after `seconds` of the thread's CPU time, independent of
    the machine's load. Python raises it between two bytecodes, so a single call of C code runs to its end.

    One thread at a time may use a TimeLimit. A watcher thread checks the clock, so that entering and leaving takes only
    some microseconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # The running block: thread, clock, end. Either the thread or the watcher removes it.
        self._running: list[tuple[int, int, float]] = []
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="time-limit", daemon=True).start()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._running.append((thread, time.pthread_getcpuclockid(thread), time.thread_time() + self.seconds))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not TimeLimitError:
            try:
                self._running.pop()
            except IndexError:
                # The watcher is raising the error in this thread. It must not hit other work.
                while True:
                    time.sleep(0)

    def end_overdue(self) -> None:
        """Raises TimeLimitError in the thread of an overdue block."""
        for block in self._running[:1]:
            thread, clock, end = block
            # OSError: the thread has ended since. ValueError: the block has ended.
            with contextlib.suppress(OSError, ValueError):
                if time.clock_gettime(clock) > end:
                    self._running.remove(block)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))


def _watch(reference: "weakref.ref[TimeLimit]") -> None:
    while (limit := reference()) is not None:
        limit.end_overdue()
        del limit  # the watcher must not keep it alive
        time.sleep(_POLL_SECONDS)
