"""Work on threads of its own, for as long as a block runs."""

import threading
from collections.abc import Callable
from typing import Self


class Background:
    """Runs each of `works` on a thread while the block runs. They return soon after `is_over` is set, which is when the
    block ends; it is left when all of them have returned."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.is_over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join()
