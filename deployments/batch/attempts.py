"""The attempts at one request of a batch: which answers are its own, and the pauses between attempts."""

import asyncio
from dataclasses import dataclass

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_TRY_AGAIN = (429, 502, 503)
"""The server has no room, or is away: no fault of the request."""
_NUM_ATTEMPTS = 3
"""Of a request that the server fails at."""


@dataclass(slots=True)
class Attempts:
    pause_s: float = _FIRST_PAUSE_SECONDS
    num_failed: int = 0

    def are_over(self, status: int) -> bool:
        """Returns whether an answer with this HTTP status is the request's answer. Call it once for each attempt."""
        if status in _TRY_AGAIN:
            return False
        self.num_failed += status >= 500
        return status < 500 or self.num_failed == _NUM_ATTEMPTS

    async def pause(self, retry_after: str = "") -> None:
        """`retry_after`: the answer's header."""
        if retry_after.isdecimal():
            self.pause_s = max(self.pause_s, float(retry_after))
        await asyncio.sleep(min(self.pause_s, _LONGEST_PAUSE_SECONDS))
        self.pause_s *= 2
