"""One HTTP request, as routes see it: its id, and its place among all."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from deployments.admission import Ticket
from deployments.api_keys import Caller


@dataclass(frozen=True, slots=True)
class Call:
    """What `deployments.gate` has found out of a request."""

    request_id: str
    ticket: Ticket

    @property
    def caller(self) -> Caller:
        return self.ticket.caller

    @property
    def tenant_salt(self) -> str:
        return self.caller.tenant_salt


async def _call_of(request: Request) -> Call:
    return Call(request.state.request_id, request.state.ticket)


HttpCall = Annotated[Call, Depends(_call_of)]
