"""The way of tokens from an engine to the client: processes that pass on what is ready together."""

from collections import Counter
from collections.abc import Callable

from raylens.planning.cores import Process
from raylens.planning.costs import Work
from raylens.planning.request_run import RequestRun

Tokens = Counter[RequestRun]
"""How many tokens of which answer."""


class TokenRelay:
    """Passes tokens on. While its process is busy, further tokens gather, and go together as one message."""

    def __init__(self, process: Process, work: Work, pass_on: Callable[[Tokens], None]) -> None:
        self._process = process
        self._work = work
        self._pass_on = pass_on
        self._gathered: Tokens = Counter()

    def send(self, tokens: Tokens) -> None:
        is_queued = bool(self._gathered)
        self._gathered.update(tokens)
        if not is_queued:
            self._queue()

    def _queue(self) -> None:
        taken: Tokens = Counter()

        def begin() -> float:
            taken.update(self._gathered)
            self._gathered.clear()
            return self._work.of_pieces(len(taken))

        self._process.submit(begin, lambda: self._pass_on(taken))
