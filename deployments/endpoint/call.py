"""One HTTP request as the routes see it: its id, its caller and its ticket of admission."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from raylens.deployments.api.wire import RequestBody
from raylens.deployments.endpoint.admission import Ticket
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.deadline import Deadline, seconds_in
from raylens.deployments.endpoint.request_traces import TracedRequest
from raylens.deployments.pipeline.long_texts import LongTexts
from raylens.deployments.request_context import NO_REQUEST
from raylens.preprocess.schema import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ApiCall:
    """The gate's knowledge of a request, see `deployments/endpoint/gate.py`.

    `arrived_at`: in seconds of the event loop's clock. `timeout_s`: the time limit from the header. `texts`: the long
    texts of the body. `fail`: records the error that breaks off an answer, for the log. `ignore`: records the body's
    unknown fields, for the answer's header and the log."""

    request_id: str
    ticket: Ticket
    arrived_at: float = 0.0
    timeout_s: float | None = None
    texts: LongTexts = field(default_factory=LongTexts)
    fail: Callable[[Exception], None] = lambda error: None
    ignore: Callable[[Sequence[str]], None] = lambda names: None
    traced: TracedRequest = field(default_factory=lambda: TracedRequest(NO_REQUEST))

    @property
    def caller(self) -> Caller:
        return self.ticket.caller

    @property
    def cache_salt(self) -> str:
        return self.caller.cache_salt

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the request's deadline. `timeout_s`: the time limit from the body, which overrides the header."""
        return Deadline(self.arrived_at, self.timeout_s if timeout_s is None else timeout_s)

    def check_fields(self, body: RequestBody) -> None:
        """Reports the unknown fields of `body`. Raises InvalidRequestError if the client asked for strict fields."""
        if not body.unknown_fields:
            return
        if body.strict_fields:
            first, *others = body.unknown_fields
            reason = "is not known here" + "".join(f", nor is {name}" for name in others)
            raise InvalidRequestError(f"{reason} (strict_fields is true)", field=first, code="unknown_parameter")
        self.ignore(body.unknown_fields)


async def _call_of(request: Request) -> ApiCall:
    state = request.state
    note = partial(setattr, state)
    return ApiCall(
        state.request_id,
        state.ticket,
        state.arrived_at,
        seconds_in(request.headers),
        state.texts,
        partial(note, "error"),
        partial(note, "ignored_fields"),
        state.traced,
    )


HttpCall = Annotated[ApiCall, Depends(_call_of)]
"""The argument type that gives a route its ApiCall."""
