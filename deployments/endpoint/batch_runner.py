"""Works on batches: sends the requests of their files to this ingress's own routes, below live traffic."""

import asyncio
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp

from raylens.deployments.batch.answer_file import answer_line
from raylens.deployments.batch.attempts import Attempts
from raylens.deployments.batch.request_lines import LineError, RequestLines, request_in
from raylens.deployments.endpoint.api_keys import ApiKeys, Caller
from raylens.deployments.endpoint.background import until_either
from raylens.deployments.endpoint.own_request import OwnRequest
from raylens.deployments.item_store.shared_items import SharedBatches, SharedUploads
from raylens.deployments.stages.stage_calls import StageError
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

_BATCHES_AT_ONCE = 4
"""Of each shard at one ingress, which holds their files in memory."""
_LINES_AT_ONCE = 32
"""Of each batch. More would hold up live pictures in Preprocess, where items go by arrival."""
_PRIORITY = 2001
"""Above all that a request and an API key can have together: 1000 and 1000."""
_PAUSE_SECONDS = 1.0
_MAX_ERRORS = 100
"""Of the lines of one file."""


class BatchRunner:
    """`app`: the routes of this ingress. Use it on one event loop."""

    def __init__(self, shared: SharedBatches, uploads: SharedUploads, keys: ApiKeys, app: ASGIApp) -> None:
        self._shared = shared
        self._uploads = uploads
        self._keys = keys
        self._app = app
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        places = [shard for shard in self._shared.shards for _ in range(_BATCHES_AT_ONCE)]
        self._tasks = [asyncio.create_task(self._work_forever(shard)) for shard in places]

    async def close(self) -> None:
        """Ends the work, so that another ingress goes on with it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work_forever(self, shard: str) -> None:
        while True:
            try:
                tenant, batch_id = await self._shared.next(shard)
                # The shard hears of the hold first: it ends at once if another ingress works on the batch.
                await until_either(self._shared.hold(tenant, batch_id), self._work_on(tenant, batch_id))
            except StageError as error:
                logger.warning("batches of shard %s wait: %s", shard, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:
                logger.exception("batches of shard %s wait, after an error", shard)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _work_on(self, tenant: str, batch_id: str) -> None:
        try:
            outline = from_json(await self._shared.outline(tenant, batch_id))
            content = await self._uploads.read(tenant, outline["input_file_id"])
            found = await asyncio.to_thread(
                RequestLines, io.BytesIO(content), (outline["endpoint"],), max_errors=_MAX_ERRORS
            )
            if found.errors:
                await self._shared.fail(tenant, batch_id, [_told(one) for one in found.errors])
                return
            await self._shared.begin(tenant, batch_id, len(found.offsets))
            answered = set(outline["answered"])
            left = iter([offset for custom_id, offset in found.offsets.items() if custom_id not in answered])
            await self._answer_all(tenant, batch_id, content, left, answered)
        except InvalidRequestError as error:
            logger.warning("batch %s fails: %s", batch_id, error)
            told = {"code": error.code, "line": None, "message": str(error), "param": error.field}
            await self._shared.fail(tenant, batch_id, [told])

    async def _answer_all(
        self, tenant: str, batch_id: str, content: bytes, left: Iterator[int], answered: set[str]
    ) -> None:
        async def answer_in_turn() -> None:
            for offset in left:  # shared with the others
                end = content.find(b"\n", offset)
                line = content[offset : len(content) if end < 0 else end]
                await self._answer(tenant, batch_id, line, answered)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_LINES_AT_ONCE):
                    group.create_task(answer_in_turn())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, tenant: str, batch_id: str, line: bytes, answered: set[str]) -> None:
        """Sends one request until it has an answer of its own. `answered`: the ids of those of the batch that have."""
        request, attempts = request_in(line), Attempts()
        body = to_json(request.body)
        while True:
            own = OwnRequest()
            await own.send(self._app, self._caller(tenant), request.path, body)
            if attempts.are_over(own.status, len(answered)):
                break
            await attempts.pause(own.headers.get("retry-after", ""))
        answer = answer_line(request.custom_id, own.status, own.request_id, from_json(own.body))
        await self._shared.add(tenant, batch_id, request.custom_id, own.status != 200, answer)
        answered.add(request.custom_id)

    def _caller(self, tenant: str) -> Caller:
        caller = self._keys.of_tenant(tenant)
        if caller is None:
            reason = "the API key of this batch is not valid any more"
            raise InvalidRequestError(reason, field="api_key", code="invalid_api_key")
        return replace(caller, priority=_PRIORITY, is_batch=True)


def _told(error: LineError) -> dict[str, Any]:
    return {"code": error.code, "line": error.number, "message": str(error), "param": error.field}
