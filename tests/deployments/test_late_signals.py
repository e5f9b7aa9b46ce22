"""Signals wait for the end of what must not be done by half."""

import os
import signal
import threading

import pytest

from deployments.late_signals import signals_later


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_come_once_when_the_block_ends(number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with signals_later():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert came == []
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_later():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_no_handler() -> None:
    handlers = []

    def look() -> None:
        with signals_later():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
