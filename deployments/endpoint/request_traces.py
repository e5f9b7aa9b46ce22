"""The trace of each request: its span for OpenTelemetry, and a record of its stage times for `GET /v1/traces`."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from raylens.deployments.endpoint.access_log import Entry, is_quiet
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.errors import error_kind
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.server_log import process_name
from raylens.deployments.tracing.records import Attribute, OpenSpan
from raylens.deployments.tracing.spans import Spans, trace_headers
from raylens.preprocess.schema import StageTime, Stopwatch

_MOST_SPANS = 500
"""The most stage times in a record. A request may have thousands of prompts."""

_FIELD_NAMES = [one.name for one in fields(StageTime)]
_fields = attrgetter(*_FIELD_NAMES)

Keep = Callable[[str, str, bytes], None]
"""Keeps a record. Gets the tenant and the id of its request."""


class TracedRequest:
    """One request of a client. `context`: what its stages get. `entry`: its line in the log."""

    entry: Entry

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self._watch = Stopwatch()
        self._account: RequestAccount | None = None
        self._name = ""

    def follow(self, account: RequestAccount, *, name: str | None) -> None:
        """Has the record of the request made of its `account`. `name`: its client's own id for it."""
        self._account, self._name = account, name or ""

    def times(self) -> list[StageTime]:
        """Returns what was measured, in the order of beginnings."""
        if self._account is None:
            return []
        times = list(self._account.times)
        for number, request in enumerate(self._account.requests):
            own = request.trace.times
            times += own if len(self._account.requests) == 1 else [_of_prompt(number, one) for one in own]
        return sorted(times, key=attrgetter("started_at"))

    def attributes(self) -> dict[str, Attribute]:
        """Returns the attributes of a request for generated text, by the names of OpenTelemetry's conventions."""
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

    def keep(
        self, keep: Keep, tenant: str, scope: Scope, times: Sequence[StageTime], status: int, code: str | None
    ) -> None:
        """Hands the record of a request that has ended to `keep`, under its id and its client's own."""
        if (account := self._account) is None:
            return
        usage = account.usage
        record = json.dumps(
            {
                "request_id": self.context.request_id,
                "trace_id": self.context.trace_id,
                "method": scope["method"],
                "path": scope["path"],
                "model": account.model,
                "status": status,
                "error": code,
                "started_at": self._watch.started_at,
                "seconds": self._watch.read("").seconds,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "spans": as_json(times[:_MOST_SPANS]),
            }
        ).encode()
        for name in {self.context.request_id, self._name} - {""}:
            keep(tenant, name, record)


class RequestTraces:
    """The traces of one endpoint's requests. `keep`: where their records go, None for nowhere."""

    def __init__(self, spans: Spans, keep: Keep | None) -> None:
        self._spans = spans
        self._keep = keep

    @contextmanager
    def request(self, scope: Scope, headers: Headers) -> Iterator[TracedRequest]:
        """Traces one request until the block ends, in which `TracedRequest.entry` is set. Questions about the server's
        health, which come every few seconds, have no trace."""
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
        state: dict[str, Any] = scope["state"]
        error: Exception | None = state.get("error")
        status, code = traced.entry.status(error), None if error is None else error_kind(error)[1]
        times, ticket = traced.times(), state.get("ticket")
        if self._keep is not None and ticket is not None:
            traced.keep(self._keep, ticket.caller.cache_salt, scope, times, status, code)
        if not span.is_recorded:
            return
        here = process_name()
        self._spans.record_within(span, [one for one in times if one.place == here])
        told = traced.attributes() | {"http.response.status_code": status}
        if (route := getattr(scope.get("route"), "path", None)) is not None:
            span.name = f"{scope['method']} {route}"
            told["http.route"] = route
        if ticket is not None and ticket.caller.name is not None:
            told["raylens.api_key"] = ticket.caller.name
        if error is not None and code is not None:
            told["error.type"] = code
            span.note_error(error, is_failure=status >= 500 or traced.entry.has_begun_well)
        span.describe(told)


def as_json(times: Sequence[StageTime]) -> list[dict[str, Any]]:
    """Returns the times with the names of their fields, in a third of the time that `dataclasses.asdict` takes."""
    return [dict(zip(_FIELD_NAMES, _fields(one), strict=True)) for one in times]


def _of_prompt(number: int, time: StageTime) -> StageTime:
    return replace(time, part=f"prompt {number}, {time.part}" if time.part else f"prompt {number}")
