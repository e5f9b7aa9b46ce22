"""Delays stop signals until a critical section ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a process to stop. A closing terminal sends SIGHUP."""


@contextmanager
def signals_later() -> Iterator[None]:
    """Delays `STOP_SIGNALS` until the block ends. Does nothing outside the main thread, which alone handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
