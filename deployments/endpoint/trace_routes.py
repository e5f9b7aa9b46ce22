"""The route `/v1/traces/{request_id}`, which tells where the time of one request went."""

from fastapi import FastAPI
from fastapi.responses import Response

from raylens.deployments.api.traces import Trace
from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.errors import ERROR_RESPONSES
from raylens.deployments.item_store.shared_traces import SharedTraces
from raylens.preprocess.schema import InvalidRequestError

_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""What the ids in answers have before the request's own."""


class TraceRoutes:
    """`max_traces`: how many requests are known."""

    def __init__(self, traces: SharedTraces, max_traces: int) -> None:
        self._traces = traces
        self._max_traces = max_traces

    def add_to(self, api: FastAPI) -> None:
        api.add_api_route(
            "/v1/traces/{request_id}", self.trace, methods=["GET"], response_model=Trace, responses=ERROR_RESPONSES
        )

    async def trace(self, request_id: str, call: HttpCall) -> Response:
        """Returns the stage times of one of the latest requests for generated text: of this API key, with an admin's
        key of anybody. Its id is that in the answer's header X-Request-Id, or the answer's own."""
        tenant = None if call.caller.is_admin else call.cache_salt
        own = next((request_id.removeprefix(one) for one in _PREFIXES if request_id.startswith(one)), request_id)
        for name in dict.fromkeys((own, request_id)):
            if (record := await self._traces.find(tenant, name)) is not None:
                return Response(record, media_type="application/json")
        raise InvalidRequestError(
            f"no request {request_id[:100]!r}{'' if tenant is None else ' of this API key'} is among the last"
            f" {self._max_traces} that are kept",
            field="request_id",
            code="trace_not_found",
            status=404,
        )
