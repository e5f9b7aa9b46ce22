"""Routes for the operator: `/metrics` for Prometheus, and the page `/dashboard` with its figures.

They show the usage of every API key, so a server with keys requires an admin's key."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.errors import JSON_ERROR_RESPONSES, AccessError
from raylens.deployments.endpoint.page_route import OPERATOR_PAGE, page
from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.snapshot import Snapshot
from raylens.deployments.operator.summarize import RecentPages
from raylens.deployments.stages.stage_calls import StageUnavailableError

_LEAST_SECONDS = 1.0
"""Minimum interval between two reads of all nodes' metrics, however many people look."""


async def _check_admin(call: HttpCall) -> None:
    if not call.caller.is_admin:
        raise AccessError("this route takes an admin's API key, see docs/security.md", status=403)


_ADMINS_ONLY = [Depends(_check_admin)]


class OperatorRoutes:
    def __init__(self, export: Callable[[], Awaitable[bytes]]) -> None:
        """`export` reads the metrics of all nodes, in Prometheus' text format."""
        self._export = export
        self._figures = LiveFigures(export)

    def add_to(self, api: FastAPI) -> None:
        get = partial(api.add_api_route, methods=["GET"], dependencies=_ADMINS_ONLY)
        get("/metrics", self.metrics, response_class=PlainTextResponse, responses=JSON_ERROR_RESPONSES)
        page(OPERATOR_PAGE).add_to(api, "/dashboard")
        get("/dashboard/data", self.figures, include_in_schema=False)

    async def metrics(self) -> Response:
        """Returns all stages' metrics in Prometheus' text format. With API keys, takes an admin's."""
        return Response(await self._export(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def figures(self) -> Response:
        return JSONResponse(asdict(await self._figures.now()), headers={"Cache-Control": "no-store"})


class LiveFigures:
    """Recent figures, read once for all viewers."""

    def __init__(self, export: Callable[[], Awaitable[bytes]]) -> None:
        self._export = export
        self._pages = RecentPages()
        self._last: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def now(self) -> Snapshot:
        """Returns figures that are at most `_LEAST_SECONDS` old. The first call after a pause takes that long.

        Raises StageUnavailableError if no node has metrics."""
        async with self._lock:
            age = self._pages.age(asyncio.get_running_loop().time())
            if age is None or age >= _LEAST_SECONDS:
                self._last = await self._read()
            while self._last is None:
                await asyncio.sleep(_LEAST_SECONDS)
                self._last = await self._read()
            return self._last

    async def _read(self) -> Snapshot | None:
        text = await self._export()
        now = asyncio.get_running_loop().time()
        try:
            return await asyncio.to_thread(lambda: self._pages.add(MetricsPage.of_text(text.decode()), now))
        except ValueError as error:
            raise StageUnavailableError("ingress", "no node tells its metrics now") from error
