"""Sends a batch's requests to a server, many at once, each until it has an answer."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
from pydantic_core import from_json

from raylens.deployments.batch.answer_file import AnswerFile
from raylens.deployments.batch.attempts import Attempts
from raylens.deployments.batch.request_lines import BatchRequest
from raylens.deployments.operator.running_server import NoAnswerError, RunningServer, message_of

_AWAY_SECONDS = 300.0
"""So long a server may be away, as when it starts again, before the run ends."""
_CONNECT_SECONDS = 10.0
_REFUSED = (401, 403)


class Sender:
    """`timeout_s`: after so long without an answer a request is sent again."""

    def __init__(self, server: RunningServer, answers: AnswerFile, timeout_s: float) -> None:
        self._server = server
        self._answers = answers
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SECONDS)
        self._last_sign = time.monotonic()

    async def send(self, requests: Iterator[BatchRequest], concurrency: int) -> None:
        """Sends all requests. Raises NoAnswerError if the server refuses them all or is away, RuntimeError if the file
        of answers is full."""
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(headers=self._server.headers, connector=connector, timeout=self._timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(concurrency):
                group.create_task(self._send_in_turn(session, requests))

    async def _send_in_turn(self, session: aiohttp.ClientSession, requests: Iterator[BatchRequest]) -> None:
        for request in requests:  # shared with the others
            await self._answer(session, request)

    async def _answer(self, session: aiohttp.ClientSession, request: BatchRequest) -> None:
        """Sends one request until it has an answer of its own."""
        attempts = Attempts()
        while True:
            retry_after = ""
            try:
                url = self._server.url + request.path
                async with session.post(url, json=request.body, allow_redirects=False) as response:
                    status, request_id = response.status, response.headers.get("x-request-id", "")
                    retry_after, body = response.headers.get("retry-after", ""), await _body(response)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._check_sign(error)
            else:
                if status in _REFUSED:
                    raise NoAnswerError(f"{self._server.url} refuses the requests: {_message(body)}")
                if status == 503:
                    self._check_sign(_message(body))
                if attempts.are_over(status, len(self._answers.done)):
                    self._last_sign = time.monotonic()
                    self._answers.add(request.custom_id, status, request_id, body)
                    return
            await attempts.pause(retry_after)

    def _check_sign(self, reason: object) -> None:
        """Raises NoAnswerError if the server has been away for too long."""
        if time.monotonic() > self._last_sign + _AWAY_SECONDS:
            away = f"{self._server.url} has not answered for {_AWAY_SECONDS:.0f} s: {reason or type(reason).__name__}"
            raise NoAnswerError(f"{away}; the same command goes on from here")


async def _body(response: aiohttp.ClientResponse) -> Any:
    """Returns the JSON of an answer, or its text where that is no JSON."""
    content = await response.read()
    try:
        return from_json(content)
    except ValueError:
        return content.decode(errors="replace")


def _message(body: Any) -> str:
    return message_of(body) or str(body)[:200]
