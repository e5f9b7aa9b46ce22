"""Ends a process whose event loop hangs, so that Ray Serve replaces the replica.

Ray Serve's own health check detects such a replica, too, but stops it with a call that needs the event loop."""

import asyncio
import faulthandler

_LIMIT_SECONDS = 10.0
"""Ray Serve's own timeout of a health check. The longest steps of a healthy event loop take a second."""
_BEATS_PER_LIMIT = 10


def end_when_stuck(log_descriptor: int, limit_s: float = _LIMIT_SECONDS) -> None:
    """Ends this process with status 1 once the running event loop has not turned for `limit_s`. First writes the stacks
    of all threads to the file `log_descriptor`.

    The watch starts with the loop's next turn, so a constructor may take any time. faulthandler watches from a native
    thread, so code that holds the interpreter lock cannot block it."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=log_descriptor)
        loop.call_later(limit_s / _BEATS_PER_LIMIT, beat)

    loop.call_soon(beat)
