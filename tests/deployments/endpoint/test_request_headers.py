"""Headers that Ray Serve reads before the gate does: it sees none of a client's but the id, and that one checked."""

import ast
import re
from pathlib import Path

import pytest
import ray.serve
from ray.serve._private import constants
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
OF_REQUEST_ROUTERS = ["x-serve-router-", "request_headers"]
"""Headers of HAProxy and of Ray Serve's request routers, which this application has none of."""
OF_ANSWERS = ["content-type", "retry-after"]
NO_HEADERS = ["utf-8"]
ROOT = Path(ray.serve.__file__).parent
FORM = re.compile(r"[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)+|traceparent|tracestate")


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


# Ray Serve's source


def names_in(source: str) -> set[str]:
    """What may be a header's name in the functions that deal with headers: constants of Ray Serve, and texts of a
    header's form."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and "header" in ast.unparse(function).lower():
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(value := getattr(constants, node.id, None), str):
                    found.add(value)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                    text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                    found |= {text} if FORM.fullmatch(text) else set()
    return {name.lower() for name in found}


def test_ray_serve_reads_no_other_header() -> None:
    found = set()
    for file in ("proxy", "proxy_request_response", "replica", "http_util"):
        found |= names_in((ROOT / "_private" / f"{file}.py").read_text())
    assert found - set(NO_HEADERS) - set(OF_ANSWERS) == {*DROPPED, *TRACE_CONTEXT, ID}


def test_every_constant_of_ray_serve_that_names_a_header_is_known() -> None:
    named = {value for name, value in vars(constants).items() if "HEADER" in name and isinstance(value, str)}
    assert named == {*DROPPED[:2], ID, *OF_REQUEST_ROUTERS}


def test_no_other_file_of_ray_serve_gets_requests() -> None:
    """HAProxy's headers are in templates; the others are of Prometheus, of codecs and of documentation."""
    skipped = ("tests", "llm", "_private/benchmarks", "_private/test_utils.py")
    files = [file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if "headers" in file.read_text()]
    assert {file for file in files if not file.startswith(skipped)} == {
        *(f"_private/{name}.py" for name in ("proxy", "proxy_request_response", "replica", "http_util")),
        *(f"_private/{name}.py" for name in ("constants", "common", "haproxy", "haproxy_templates")),
        "api.py",
        "autoscaling_policy.py",
    }
