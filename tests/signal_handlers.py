"""A handler for a signal while a test needs it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Sets the signal's handler for the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
