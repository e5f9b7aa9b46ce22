"""Headers that Ray Serve reads before the gate does: it sees none of a client's but the id, and that one checked."""

import re

import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from raylens.deployments.endpoint.request_headers import RequestHeaders, middlewares

ID = "x-request-id"
DROPPED = [
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-session-id",
    "serve_multiplexed_model_id",
]
ALIASES = ["X-Session-Id", "X_Session_Id", "serve-multiplexed-model-id", "serve_multiplexed-model-id"]
TRACE_CONTEXT = ["traceparent", "tracestate"]


async def passed(*sent: tuple[str, str]) -> Headers:
    """What is behind the middleware of a request with these headers."""
    found: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)

    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    await RequestHeaders(app)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    return Headers(scope=found[0])


@pytest.mark.parametrize("name", DROPPED + ALIASES)
async def test_orders_to_ray_serve_are_dropped(name: str) -> None:
    found = await passed((name, "?1"), (name, "\xff"), ("x-session-idle", "kept"), ("host", "here"))
    assert [name for name, _ in found.items()] == ["x-session-idle", "host", ID]


@pytest.mark.parametrize("name", TRACE_CONTEXT)
async def test_the_trace_goes_on_unless_it_is_none(name: str) -> None:
    assert (await passed((name, "00-1-2-01")))[name] == "00-1-2-01"
    assert name not in await passed((name, "\xff"))


@pytest.mark.parametrize("sent", [["my-id_7"], ["my-id_7", "another"]])
async def test_an_id_that_can_stand_in_a_log_is_taken(sent: list[str]) -> None:
    assert (await passed(*((ID, value) for value in sent))).getlist(ID) == ["my-id_7"]


@pytest.mark.parametrize("sent", [[], [""], ["a b!"], ["\xff"], ["x" * 65], ["a\tb", "good"]])
async def test_any_other_request_has_a_new_one(sent: list[str]) -> None:
    (found,) = (await passed(*((ID, value) for value in sent))).getlist(ID)
    assert re.fullmatch("[0-9a-f]{32}", found)


def test_ray_serve_is_given_the_middleware() -> None:
    given: list[object] = [one.cls for one in middlewares()]
    assert given == [RequestHeaders]
