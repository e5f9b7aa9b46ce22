"""A client's time limit for a request: the field `timeout_s`, or the header `x-request-timeout-s`. At the deadline the
ingress cancels the request's calls in every stage. A retried call has only the remaining time."""

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

from starlette.datastructures import Headers

from raylens.deployments.api.prompt_fields import MAX_TIMEOUT_S
from raylens.preprocess.schema import InvalidRequestError

ResultT = TypeVar("ResultT")

HEADER = "x-request-timeout-s"


class DeadlineError(TimeoutError):
    """The client's time limit has expired."""


class Deadline:
    """`arrived_at`: in seconds of the event loop's clock. `seconds`: the time limit; None: no limit."""

    def __init__(self, arrived_at: float, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else arrived_at + seconds

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """Returns the result of `work`. Raises DeadlineError at the deadline."""
        if self._at is None:  # the fast path: this runs for each token
            return await work
        try:
            async with asyncio.timeout_at(self._at) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise DeadlineError(f"the request has taken {self._seconds:g} s, the time that it gave") from None
            raise


def seconds_in(headers: Headers) -> float | None:
    """Returns the header's time limit in seconds. Raises InvalidRequestError."""
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
