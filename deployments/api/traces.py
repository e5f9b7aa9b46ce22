"""What `GET /v1/traces/{request_id}` answers: where the time of one request went."""

from typing import Literal

from pydantic import BaseModel


class TraceSpan(BaseModel):
    """Something that took time: the stage, when it began (seconds since 1970), how many seconds it took, the process
    that did it, which item or prompt of the request it was for, and what else is to be said."""

    stage: str
    started_at: float
    seconds: float
    place: str
    part: str
    detail: str


class Trace(BaseModel):
    """One request. Its id and that of its trace, what was asked of which model, the answer's status (499: the client
    left), the code of its error, when it came and how long it took. `spans` are in the order of their beginnings."""

    object: Literal["trace"] = "trace"
    request_id: str
    trace_id: str
    method: str
    path: str
    model: str
    status: int
    error: str | None
    started_at: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    spans: list[TraceSpan]
