"""The trace of each request: its span for OpenTelemetry, and its stage times."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from raylens.deployments.endpoint.access_log import Entry, is_quiet
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.errors import error_kind
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.server_log import process_name
from raylens.deployments.tracing.spans import Attribute, OpenSpan, Spans, trace_headers
from raylens.preprocess.schema import StageTime


class TracedRequest:
    """One request of a client. `context`: for its stages. `entry`: its line in the log."""

    entry: Entry

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self._account: RequestAccount | None = None

    def follow(self, account: RequestAccount) -> None:
        """Takes the stage times and the usage from `account`."""
        self._account = account

    def times(self) -> list[StageTime]:
        if self._account is None:
            return []
        return [*self._account.times, *chain.from_iterable(one.trace.times for one in self._account.requests)]

    def log_fields(self) -> dict[str, Any]:
        """Returns the additional log fields of a generation request. `raylens trace` reads them."""
        if self._account is None:
            return {}
        timings = self._account.timings().model_dump()
        return {"response_id": self._account.request_id, "model": self._account.model, "stage_timings": timings}

    def attributes(self) -> dict[str, Attribute]:
        """Returns the attributes of a generation request, by OpenTelemetry's semantic conventions."""
        account = self._account
        if account is None:
            return {}
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
        return told


class RequestTraces:
    """The traces of one endpoint's requests."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    @contextmanager
    def request(self, scope: Scope, headers: Headers) -> Iterator[TracedRequest]:
        """Traces one request until the block ends. The block sets `TracedRequest.entry`. Polled paths have no trace."""
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
        with self._spans.root(request_id, given, method, attributes) as span, in_request(span.context):
            traced = TracedRequest(span.context)
            try:
                yield traced
            finally:
                self._end(traced, span, scope)

    def _end(self, traced: TracedRequest, span: OpenSpan, scope: Scope) -> None:
        if not span.is_recorded:
            return
        state: dict[str, Any] = scope["state"]
        error: Exception | None = state.get("error")
        status, here = traced.entry.status(error), process_name()
        self._spans.record(span.context, [one for one in traced.times() if one.place == here])
        told = traced.attributes() | {"http.response.status_code": status}
        if (route := getattr(scope.get("route"), "path", None)) is not None:
            span.rename(f"{scope['method']} {route}")
            told["http.route"] = route
        if "ticket" in state and (key := state["ticket"].caller.name) is not None:
            told["raylens.api_key"] = key
        if error is not None:
            told["error.type"] = error_kind(error)[1]
            span.note_error(error, is_failure=status >= 500 or traced.entry.has_begun_well)
        span.describe(told)
