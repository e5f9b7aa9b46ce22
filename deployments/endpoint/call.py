"""One HTTP request as the routes see it: its id, its caller and its ticket of admission."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from raylens.deployments.api.wire import RequestBody
from raylens.deployments.endpoint.admission import Ticket
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.deadline import seconds_in
from raylens.deployments.endpoint.request_traces import TracedRequest
from raylens.deployments.pipeline.long_texts import LongTexts
from raylens.deployments.request_context import NO_REQUEST
from raylens.preprocess.schema import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ApiCall:
    """The gate's knowledge of a request, see `deployments/endpoint/gate.py`.

    `arrived_at`: in seconds of the event loop's clock. `timeout_s`: the time limit from the header. `texts`: the long
    texts of the body. `state`: the request's `scope["state"]`, which the gate and the log read at its end."""

    request_id: str
    ticket: Ticket
    arrived_at: float = 0.0
    timeout_s: float | None = None
    texts: LongTexts = field(default_factory=LongTexts)
    traced: TracedRequest = field(default_factory=lambda: TracedRequest(NO_REQUEST))
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def caller(self) -> Caller:
        return self.ticket.caller

    def fail(self, error: Exception) -> None:
        self.state["error"] = error

    def check_fields(self, body: RequestBody) -> None:
        """Records the unknown fields of `body`. Raises InvalidRequestError if the client asked for strict fields."""
        if body.unknown_fields and body.strict_fields:
            first, *others = body.unknown_fields
            reason = "is not known here" + "".join(f", nor is {name}" for name in others)
            raise InvalidRequestError(f"{reason} (strict_fields is true)", field=first, code="unknown_parameter")
        self.state["ignored_fields"] = body.unknown_fields


def call_of(request: Request) -> ApiCall:
    state = request.scope["state"]
    names = ("request_id", "ticket", "arrived_at", "texts", "traced")
    return ApiCall(**{name: state[name] for name in names}, timeout_s=seconds_in(request.headers), state=state)


async def _call(request: Request) -> ApiCall:  # FastAPI calls a plain function on a thread
    return call_of(request)


HttpCall = Annotated[ApiCall, Depends(_call)]
"""The argument type that gives a route its ApiCall."""
