"""Signals wait for the end of what must not be done by half."""

import os
import signal
import threading

import pytest

from raylens.deployments.cluster.ray_session import signals_later
from tests.signal_handlers import handled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_come_once_when_the_block_ends(number: signal.Signals) -> None:
    came: list[int] = []
    with handled(number, lambda number, frame: came.append(number)):
        with signals_later():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert came == []
        assert came == [number]


def test_an_ignored_signal_stays_ignored() -> None:
    with handled(signal.SIGINT, signal.SIG_IGN), signals_later():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_changes_no_handler() -> None:
    handlers = []

    def look() -> None:
        with signals_later():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
