"""One HTTP request, as routes see it: its id, and its place among all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from deployments.admission import Ticket
from deployments.api_keys import Caller
from deployments.long_texts import LongTexts


@dataclass(frozen=True, slots=True)
class Call:
    """What `deployments.gate` has found out of a request. `texts`: the long ones of its body. `fail` is told why an
    answer that has begun does not go on, which stands in the log then."""

    request_id: str
    ticket: Ticket
    texts: LongTexts = field(default_factory=LongTexts)
    fail: Callable[[Exception], None] = lambda error: None

    @property
    def caller(self) -> Caller:
        return self.ticket.caller

    @property
    def tenant_salt(self) -> str:
        return self.caller.tenant_salt


async def _call_of(request: Request) -> Call:
    state = request.state
    return Call(state.request_id, state.ticket, state.texts, partial(setattr, state, "error"))


HttpCall = Annotated[Call, Depends(_call_of)]
