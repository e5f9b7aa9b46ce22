"""The attempts at one request of a batch: which answers are its own, and the pauses between attempts."""

import asyncio
from dataclasses import dataclass

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_NO_ROOM = 429
_AWAY = (502, 503)
"""The server, or a stage, is away."""
_MAX_AWAY = 20
"""Times that the server is away for a request while it answers others: such a request may kill a stage itself."""
_MAX_FAILED = 3
"""Times that the server fails at a request."""


@dataclass(slots=True)
class Attempts:
    pause_s: float = _FIRST_PAUSE_SECONDS
    num_failed: int = 0
    num_away: int = 0
    num_answered: int = 0

    def are_over(self, status: int, num_answered: int) -> bool:
        """Returns whether an answer with this HTTP status is the request's answer. Call it once for each attempt.
        `num_answered`: requests of the batch that have an answer."""
        if status == _NO_ROOM:
            return False
        if status in _AWAY:
            self.num_away += num_answered > self.num_answered
            self.num_answered = num_answered
            return self.num_away == _MAX_AWAY
        self.num_failed += status >= 500
        return status < 500 or self.num_failed == _MAX_FAILED

    async def pause(self, retry_after: str = "") -> None:
        """`retry_after`: the answer's header."""
        if retry_after.isdecimal():
            self.pause_s = max(self.pause_s, float(retry_after))
        await asyncio.sleep(min(self.pause_s, _LONGEST_PAUSE_SECONDS))
        self.pause_s *= 2
