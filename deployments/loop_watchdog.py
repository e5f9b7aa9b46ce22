"""Ends a process whose event loop stands still, so that Ray Serve replaces the replica.

Ray Serve's own health check sees such a replica, too, but stops it by a call that its event loop would have to run."""

import asyncio
import faulthandler

_LIMIT_SECONDS = 10.0
"""As long as Ray Serve waits for one health check. The longest steps of a healthy event loop take a second."""
_BEATS_PER_LIMIT = 10


def end_when_stuck(log_descriptor: int, limit_s: float = _LIMIT_SECONDS) -> None:
    """Ends this process with status 1 once the running event loop has made no turn for `limit_s`. The stacks of all
    threads go to the file `log_descriptor` first.

    The watch begins with the loop's next turn, so a constructor may take as long as it needs. faulthandler watches from
    a thread without Python code: code that holds the interpreter lock does not hold it up."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=log_descriptor)
        loop.call_later(limit_s / _BEATS_PER_LIMIT, beat)

    loop.call_soon(beat)
