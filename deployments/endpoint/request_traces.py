"""The trace of each request: its span for OpenTelemetry, and its stage times."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from raylens.deployments.endpoint.access_log import is_quiet
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.errors import error_kind
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.server_log import process_name
from raylens.deployments.tracing.spans import Attribute, OpenSpan, Spans, trace_headers


@dataclass(slots=True)
class TracedRequest:
    """`context`: for the request's stages. `account`: the stage times and the usage of a generation request."""

    context: RequestContext
    account: RequestAccount | None = None

    def log_fields(self) -> dict[str, Any]:
        """Returns the additional log fields of a generation request. `raylens trace` reads them."""
        if (account := self.account) is None:
            return {}
        timings = account.timings().model_dump()
        return {"response_id": account.request_id, "model": account.model, "stage_timings": timings}


@contextmanager
def traced_request(spans: Spans, scope: Scope, headers: Headers) -> Iterator[TracedRequest]:
    """Traces one request until the block ends. The block sets `scope["state"]["entry"]`. Polled paths have no trace."""
    request_id: str = scope["state"]["request_id"]
    if is_quiet(scope):
        context = RequestContext(request_id)
        with in_request(context):
            yield TracedRequest(context)
        return
    given = trace_headers({name: headers.getlist(name) for name in ("traceparent", "tracestate")})
    method = scope["method"]
    attributes = {
        "http.request.method": method,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "raylens.request_id": request_id,
    }
    with spans.root(request_id, given, method, attributes) as span, in_request(span.context):
        traced = TracedRequest(span.context)
        try:
            yield traced
        finally:
            if span.is_recorded:
                _describe(span, scope)
                if traced.account is not None:
                    _describe_generation(span, traced.account, spans)


def _describe(span: OpenSpan, scope: Scope) -> None:
    state: dict[str, Any] = scope["state"]
    error: Exception | None = state.get("error")
    status = state["entry"].status(error)
    told: dict[str, Attribute] = {"http.response.status_code": status}
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        span.rename(f"{scope['method']} {route}")
        told["http.route"] = route
    if "ticket" in state and (key := state["ticket"].caller.name) is not None:
        told["raylens.api_key"] = key
    if error is not None:
        told["error.type"] = error_kind(error)[1]
        span.note_error(error, is_failure=status >= 500 or state["entry"].has_begun_well)
    span.describe(told)


def _describe_generation(span: OpenSpan, account: RequestAccount, spans: Spans) -> None:
    """Adds the stage times of this process, and attributes by OpenTelemetry's semantic conventions."""
    times = chain(account.times, *(request.trace.times for request in account.requests))
    spans.record(span.context, [one for one in times if one.place == process_name()])
    usage = account.usage
    told: dict[str, Attribute] = {
        "gen_ai.operation.name": "text_completion" if account.request_id.startswith("cmpl-") else "chat",
        "gen_ai.provider.name": "raylens",
        "gen_ai.request.model": account.model,
        "gen_ai.response.id": account.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if account.has_begun:
        told["gen_ai.latency.time_to_first_token"] = account.time_to_first_token
        told["gen_ai.response.finish_reasons"] = account.finish_reasons
    span.describe(told)
