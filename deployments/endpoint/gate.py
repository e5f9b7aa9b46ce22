"""ASGI middleware before every route: it checks the API key, bounds the body and logs the request.

The gate reads bodies of known senders only, and only as much as the budgets allow."""

import asyncio
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylens.deployments.config import AdmissionConfig
from raylens.deployments.endpoint.access_log import listed, log_entry
from raylens.deployments.endpoint.admission import Admission, OverloadedError, Ticket
from raylens.deployments.endpoint.api_keys import ApiKeys, Caller
from raylens.deployments.endpoint.errors import AccessError, response_for
from raylens.deployments.endpoint.page_route import PREFIX
from raylens.deployments.endpoint.request_cost import RequestCost
from raylens.deployments.endpoint.request_headers import checked_request_id
from raylens.deployments.endpoint.request_traces import traced_request
from raylens.deployments.endpoint.sign_in_routes import SIGN_OUT, key_in_cookie
from raylens.deployments.pipeline.long_texts import LongTexts
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.tracing.spans import Spans
from raylens.preprocess.schema import InvalidRequestError

_OPEN_PATHS = frozenset({"/health", "/ping", "/", "/dashboard", SIGN_OUT})
"""The pages themselves hold nothing of their own: their scripts call routes that take a key."""
_MAX_JSON_PARTS = 2**18
"""Limit on commas and brackets in a JSON body. Memory and validation time grow mainly with these, not with bytes."""
_MAX_JSON_BYTES = 32 * 2**20
"""Limit on the bytes of a JSON body without its long texts. Parsing a megabyte blocks all requests for 1 ms."""
_INLINE_BYTES = 2**20
_REQUEST_PIECE_BYTES = 2**12
"""The cost in `Turns` of a request from the end of its body to its admission or refusal. It takes about two
milliseconds, as long as this many bytes of answer pieces."""
_BODY_BYTES_PER_PIECE_BYTE = 32
"""This many bytes of a body take as long as one byte of answer pieces."""
_MAX_HEADERS, _MAX_HEADER_BYTES = 100, 2**14
_PORT = re.compile(r":[0-9]*$")
_IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}")
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa", ".lan")
"""Domains outside of public DNS: RFC 6761, 6762 and 8375, ICANN's for private use, and that of most routers."""


@dataclass(eq=False, kw_only=True)
class Gate:
    """Fills `scope["state"]` for the ApiCall of `deployments/endpoint/call.py`. Errors leave in OpenAI's form.

    `origins`: other origins whose pages may call, besides the server's own. `hosts`: the server's names in public DNS.
    `count_error`: see `log_entry`. `open_requests`: counts the unanswered requests. `turns`: between tenants."""

    app: ASGIApp = field(kw_only=False)
    keys: ApiKeys
    admission: Admission
    config: AdmissionConfig
    origins: Collection[str]
    hosts: Collection[str]
    count_error: Callable[[str, str], None]
    open_requests: PendingWork
    spans: Spans
    turns: Turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        headers = Headers(scope=scope)
        state["request_id"] = checked_request_id(headers.get("x-request-id", ""))
        state["arrived_at"] = asyncio.get_running_loop().time()
        with (
            self.open_requests.call(1),
            traced_request(self.spans, scope, headers) as state["traced"],
            log_entry(scope, self.count_error) as state["entry"],
        ):
            try:
                await self._pass(scope, headers, receive, _with_headers(state, state["entry"].noting(send)))
            except Exception as error:
                state["error"] = error  # an outer middleware answers it
                raise

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        state = scope["state"]
        try:
            _check_headers(headers)
            if scope["path"] in _OPEN_PATHS or scope["path"].startswith(PREFIX):
                await self.app(scope, receive, send)
                return
            # Of an OwnRequest. No client can set it: Ray Serve makes the state.
            caller = state.get("caller") or self._caller(headers)
        except (AccessError, InvalidRequestError) as error:
            state["error"] = error
            await response_for(error, scope["path"])(scope, receive, send)
            return
        with self.admission.ticket(caller) as ticket:
            state["ticket"] = ticket
            try:
                body, state["texts"] = await self._body(headers, receive, ticket)
            except (InvalidRequestError, OverloadedError) as error:
                state["error"] = error
                response = response_for(error, scope["path"])
                response.headers["connection"] = "close"  # the rest of the body stays unread
                await response(scope, receive, send)
                return
            finally:
                state["num_body_bytes"] = ticket.held.bytes
            await self.app(scope, _replayed(body, receive), send)

    def _caller(self, headers: Headers) -> Caller:
        """Returns the sender of the request. Raises AccessError."""
        # Anthropic's clients send the key in a header of its own.
        key = _bearer(headers.get("authorization", "")) or headers.get("x-api-key")
        is_by_cookie = key is None and (key := key_in_cookie(headers)) is not None
        caller = self.keys.find(key)
        if caller is None:
            reason = "no API key was sent" if key is None else "the API key is not valid"
            raise AccessError(reason, status=401, challenge="Bearer")
        if self._is_foreign(headers, is_by_cookie=is_by_cookie):
            raise AccessError("pages of other sites may not call this server, see ingress.cors_origins", status=403)
        if self.keys.is_open and not self._is_own(headers.get("host", "")):
            reason = "a server without API keys answers to public names only that are in ingress.allowed_hosts"
            raise AccessError(reason, status=403)
        return caller

    def _is_own(self, host: str) -> bool:
        """Returns whether no outsider can control this host name. The owner of a public name can point it at a private
        address; a browser then treats the server as a part of the owner's site (DNS rebinding)."""
        name = _PORT.sub("", host).lower().rstrip(".")
        is_address = name.startswith("[") or _IPV4.fullmatch(name) is not None
        return is_address or "." not in name or name.endswith(_PRIVATE_DOMAINS) or name in self.hosts

    def _is_foreign(self, headers: Headers, *, is_by_cookie: bool) -> bool:
        """Returns whether a page of another site sent the request, by the browser's headers. Such a page could reach a
        server of the private network through its visitor's browser, or use a key that the browser adds."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            return origin.partition("://")[2] != headers.get("host", "")
        return is_by_cookie and headers.get("sec-fetch-site", "none") not in ("same-origin", "none")

    async def _body(self, headers: Headers, receive: Receive, ticket: Ticket) -> tuple[bytes, LongTexts]:
        """Returns the body, and separately the long texts of a JSON body. Raises InvalidRequestError for a body that is
        too large or too slow, OverloadedError if there is no room for it."""
        claimed = headers.get("content-length", "0")
        if claimed.isdecimal():
            _check_body(int(claimed), "bytes or more", self.config.max_body_bytes)
        chunks, texts = list[bytes](), LongTexts()
        num_bytes = num_parts = num_kept = 0
        is_json = not headers.get("content-type", "").startswith("multipart/")
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    chunk, is_last = message.get("body", b""), not message.get("more_body", False)
                    num_bytes += len(chunk)
                    _check_body(num_bytes, "bytes or more", self.config.max_body_bytes)
                    ticket.take(RequestCost(bytes=len(chunk)))
                    work = len(chunk) // _BODY_BYTES_PER_PIECE_BYTE + is_last * _REQUEST_PIECE_BYTES
                    await self.turns.take(ticket.caller.cache_salt, work)
                    if is_json:
                        chunk = texts.take(chunk) + (texts.rest() if is_last else b"")
                        num_parts += num_json_parts(chunk)
                        num_kept += len(chunk)
                        check_json(num_parts, num_kept)
                    chunks.append(chunk)
                    if is_last:
                        break
        except TimeoutError:
            reason = f"{num_bytes} bytes came in {self.config.body_timeout_s:g} s, which is the limit for all of them"
            raise InvalidRequestError(reason, field="body", code="body_timeout", status=408) from None
        if num_kept < _INLINE_BYTES:
            return b"".join(chunks), texts
        return await asyncio.to_thread(b"".join, chunks), texts


def _with_headers(state: dict[str, Any], send: Send) -> Send:
    """Wraps `send` to add the headers for the request's trace and for the body's ignored fields."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = []
            if traceparent := state["traced"].context.traceparent:
                added.append((b"traceparent", traceparent.encode()))
            if names := state.get("ignored_fields"):
                value = listed([quote(name, safe="[].") for name in names])
                added.append((b"x-raylens-ignored-fields", value.encode()))
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return named


def num_json_parts(chunk: bytes) -> int:
    """Returns the number of commas and brackets that open."""
    return sum(chunk.count(mark) for mark in (b",", b"{", b"["))


def check_json(num_parts: int, num_bytes: int) -> None:
    """Checks the work of parsing JSON, without its long texts. Raises InvalidRequestError."""
    _check_body(num_parts, "commas and brackets or more", _MAX_JSON_PARTS)
    _check_body(num_bytes, "bytes or more beside media in base64 without line breaks", _MAX_JSON_BYTES)


def _check_body(number: int, unit: str, limit: int) -> None:
    if number > limit:
        reason = f"{number} {unit}, the limit is {limit}"
        raise InvalidRequestError(reason, field="body", code="body_too_large", status=413)


def _check_headers(headers: Headers) -> None:
    num_bytes = sum(len(name) + len(value) for name, value in headers.raw)
    for number, unit, limit in ((len(headers.raw), "headers", _MAX_HEADERS), (num_bytes, "bytes", _MAX_HEADER_BYTES)):
        if number > limit:
            reason = f"{number} {unit}, the limit is {limit}"
            raise InvalidRequestError(reason, field="headers", code="headers_too_large", status=431)


def _bearer(authorization: str) -> str | None:
    scheme, _, value = authorization.partition(" ")
    return (value.strip() or None) if scheme.lower() == "bearer" else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Wraps `receive` to begin with the body already read."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
