"""The routes of batches: `/v1/batches`."""

from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import Response

from raylens.deployments.api.batches import Batch, BatchList, BatchRequestBody
from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.errors import ERROR_RESPONSES
from raylens.deployments.endpoint.pages import page
from raylens.deployments.item_store.shared_items import SharedBatches


class BatchRoutes:
    def __init__(self, shared: SharedBatches) -> None:
        self._shared = shared

    def add_to(self, api: FastAPI) -> None:
        batches, batch, route = "/v1/batches", "/v1/batches/{batch_id}", api.add_api_route
        route(batches, self.create, methods=["POST"], response_model=Batch, responses=ERROR_RESPONSES)
        route(batches, self.batches, methods=["GET"], response_model=BatchList, responses=ERROR_RESPONSES)
        route(batch, self.batch, methods=["GET"], response_model=Batch, responses=ERROR_RESPONSES)
        route(f"{batch}/cancel", self.cancel, methods=["POST"], response_model=Batch, responses=ERROR_RESPONSES)

    async def create(self, body: BatchRequestBody, call: HttpCall) -> Response:
        """Answers the requests of a file below live traffic. The file was uploaded with the purpose `batch`."""
        call.check_fields(body)
        max_age_s = body.output_expires_after.seconds if body.output_expires_after else None
        fields = (body.input_file_id, body.endpoint, body.metadata, max_age_s)
        batch = Batch(**await self._shared.create(call.caller.cache_salt, *fields))
        return Response(batch.model_dump_json(), media_type="application/json")

    async def batches(
        self, call: HttpCall, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """Lists the batches of this API key, newest first."""
        newest = (await self._shared.all(call.caller.cache_salt))[::-1]
        return page(newest, [one["id"] for one in newest], limit, after)

    async def batch(self, batch_id: str, call: HttpCall) -> dict[str, Any]:
        """Tells how far a batch of this API key is."""
        return await self._shared.get(call.caller.cache_salt, batch_id)

    async def cancel(self, batch_id: str, call: HttpCall) -> dict[str, Any]:
        """Ends the work on a batch. The answers so far stay."""
        return await self._shared.cancel(call.caller.cache_salt, batch_id)
