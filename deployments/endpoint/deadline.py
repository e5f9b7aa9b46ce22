"""The time that a client gives a request: its field `timeout_s`, or the header `x-request-timeout-s`.

At its end all work on the request ends, in every stage: the ingress cancels its calls, as it does when a client leaves.
A call that is made again, because a replica has died, has what is left of the time."""

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

from starlette.datastructures import Headers

from raylens.deployments.api.generation import MAX_TIMEOUT_S
from raylens.preprocess.schema import InvalidRequestError

ResultT = TypeVar("ResultT")

HEADER = "x-request-timeout-s"


class DeadlineError(TimeoutError):
    """The time that the client gave has passed."""


class Deadline:
    """`arrived_at`: when the request arrived, in seconds of the event loop's clock. `seconds`: its time; None: any."""

    def __init__(self, arrived_at: float, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else arrived_at + seconds

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """Returns the result of `work`. Raises DeadlineError once the time has passed."""
        if self._at is None:  # as for most requests, and this is called for each token
            return await work
        try:
            async with asyncio.timeout_at(self._at) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise DeadlineError(f"the request has taken {self._seconds:g} s, the time that it gave") from None
            raise


def seconds_in(headers: Headers) -> float | None:
    """Returns the time that the header gives. Raises InvalidRequestError unless it is a number above 0."""
    if (text := headers.get(HEADER)) is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        reason = f"{text[:40]!r} is not a number of seconds above 0 and up to {MAX_TIMEOUT_S:g}"
        raise InvalidRequestError(reason, field=HEADER, code="invalid_timeout")
    return seconds
