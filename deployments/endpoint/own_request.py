"""A request that the ingress sends to its own routes, in place of a client that is gone."""

import asyncio
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from raylens.deployments.endpoint.api_keys import Caller


@dataclass(slots=True)
class OwnRequest:
    """The answer is in `status`, `headers` and `body`."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: int = 0
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""

    async def send(self, app: ASGIApp, caller: Caller, path: str, body: bytes) -> None:
        """Posts a JSON body. An exception is the answer that the app gives for it."""
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            # Nobody disconnects: who waits for that waits until the answer is whole.
            return given.pop() if given else await asyncio.get_running_loop().create_future()

        try:
            await app(self._scope(caller, path), receive, self._take)
        except Exception:
            if not self.body:  # else the app has answered, and raises for the log of its server
                raise

    def _scope(self, caller: Caller, path: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", self.request_id.encode())],
            "client": None,
            "server": None,
            "state": {"caller": caller},
        }

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], Headers(raw=message["headers"])
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
