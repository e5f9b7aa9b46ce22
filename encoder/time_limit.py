"""Stops waiting for a call that takes too long. Python cannot end the call, which continues on an abandoned thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class GivenUpError(TimeoutError):
    """The call took longer than its limit."""


class TimeLimit:
    """Runs calls one after another on a thread of its own. After a call that timed out, a new thread takes over."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the longest duration of one call."""
        self.seconds = seconds
        self.num_given_up = 0
        self._calls = self._start()

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Returns the call's result or raises its error. Raises GivenUpError if it exceeds the limit."""
        result: Future[ResultT] = Future()
        self._calls.put((call, result))
        try:
            return result.result(self.seconds)
        except TimeoutError:
            if result.done():
                raise  # the call's own TimeoutError
            self.num_given_up += 1
            self._calls = self._start()
            raise GivenUpError(f"more than {self.seconds:g} s") from None

    def _start(self) -> "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]":
        calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # A daemon, so that a thread that never ends does not block the process's exit.
        threading.Thread(target=_run, args=(calls,), name="time-limit", daemon=True).start()
        return calls


def _run(calls: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]") -> None:
    while True:
        call, result = calls.get()
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)
