"""Signals that ask this process to stop come after what must not be done by half."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a process to stop. A terminal that is closed sends SIGHUP."""


@contextmanager
def signals_later() -> Iterator[None]:
    """Delays `STOP_SIGNALS` until the block ends. Their handlers then run at once. Only the main thread handles
    signals, so in another thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled: list[int] = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def hold_back(number: int, frame: object) -> None:
        came.append(number)

    for number in handled:
        signal.signal(number, hold_back)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
