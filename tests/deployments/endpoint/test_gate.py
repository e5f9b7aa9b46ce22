"""What requests pass before their route: sizes, keys, origins. (Over HTTP: test_access.py.)"""

import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.api.completions import CompletionRequest
from raylens.deployments.api.models import Health
from raylens.deployments.api.responses import ResponsesRequest
from raylens.deployments.api.tokens import DetokenizeRequest
from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.ingress import Ingress
from raylens.deployments.endpoint.json_route import JsonRoute
from raylens.deployments.stages.stage_calls import StageFailedError, StageUnavailableError
from raylens.preprocess.data_url import data_url
from tests.gated import GatedClient, gated

JSON = {"content-type": "application/json"}


def client(environment: dict[str, str] | None = None, **settings: Any) -> GatedClient:
    api = FastAPI()
    api.router.route_class = JsonRoute

    async def detokenize(body: DetokenizeRequest, call: HttpCall) -> dict[str, Any]:
        call.check_fields(body)
        return {"held": call.ticket.held.bytes, "id": call.request_id}

    async def chat(body: ChatCompletionRequest, call: HttpCall) -> list[str]:
        """The URLs of its media, whole."""
        sources = [replace(source, texts=call.texts) for source in body.prompts_and_media()[0][1]]
        return [b"".join(source.data.pieces).decode() for source in sources if source.data is not None]

    async def fail(call: HttpCall) -> None:
        raise StageFailedError("encode", "the encode stage failed")

    async def crash(call: HttpCall) -> None:
        raise ZeroDivisionError

    async def stream(call: HttpCall) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            yield "begun"
            call.fail(StageUnavailableError("generate", "the generate stage is not available"))

        return StreamingResponse(events())

    async def health() -> None: ...

    async def ping(request: Request, states: str) -> Response:
        told = Health(ready=False, stages={state: state for state in states.split(",")}, details={})
        ingress: Any = SimpleNamespace(_models=SimpleNamespace(health=lambda: told))
        return await Ingress.health(ingress, request)

    routes: list[Any] = [detokenize, chat, fail, crash, stream]
    for route in routes:
        api.add_api_route(f"/{route.__name__}", route, methods=["POST"])
    api.add_api_route("/health", health, methods=["GET"])
    api.add_api_route("/ping", ping, methods=["GET"])
    return gated(api, environment, **settings)


def test_a_body_costs_its_bytes() -> None:
    body = json.dumps({"tokens": [1, 2, 3]})
    assert client().post("/detokenize", content=body, headers=JSON).json()["held"] == len(body)
    refused = client(max_body_bytes=10).post("/detokenize", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    small = {"requests": 1, "bytes": 10, "pixels": 1, "tokens": 1}
    refused = client(total=small).post("/detokenize", content=body)
    assert refused.status_code == 413
    assert "bytes, the limit of all requests together is 10" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"tokens": [' + "-1," * 300_000 + "1]}",
        '{"model": "m", "messages": [{"role": "user", "content": [' + "{}," * 300_000 + "{}]}]}",
        "[" * 300_000,
        "{" + ",".join(f'"{n}": 1' for n in range(300_000)) + "}",
    ],
    ids=["ids", "parts", "nested", "fields"],
)
def test_small_bodies_that_are_large_in_memory_are_refused_before_they_are_parsed(body: str) -> None:
    refused = client().post("/detokenize", content=body, headers=JSON)
    assert refused.status_code == 413
    assert "commas and brackets or more, the limit is 262144" in refused.json()["error"]["message"]


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (DetokenizeRequest, {"tokens": [-1] * 100_000}),
        (DetokenizeRequest, {"tokens": [], **{f"field {n}": 1 for n in range(100_000)}}),
        (ChatCompletionRequest, {"model": "m", "messages": [{}] * 5_000}),
        (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": [{}] * 100_000}]}),
        (ChatCompletionRequest, {**CHAT, "logit_bias": {f"x{n}": 1 for n in range(100_000)}}),
        (ResponsesRequest, {"model": "m", "input": "Hi", "metadata": {f"x{n}": 1 for n in range(100_000)}}),
        (ChatCompletionRequest, {**CHAT, "stop_token_ids": ["x"] * 100_000}),
        (ChatCompletionRequest, {**CHAT, "tools": [{}] * 100_000}),
        (CompletionRequest, {"model": "m", "prompt": [[-1] * 1000] * 60}),
        (CompletionRequest, {"model": "m", "prompt": [5] * 1000 + ["x"] * 1000}),
        (ResponsesRequest, {"model": "m", "input": [{}] * 5_000}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_many_mistakes_are_few_errors(model: type[BaseModel], body: Any) -> None:
    """pydantic makes an object of half a kilobyte of each."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 30


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def test_deep_schemas_are_refused_by_name() -> None:
    def ask(depth: int) -> Any:
        tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
        message = {"role": "user", "content": "Hi"}
        return client().post("/chat", json={"model": "m", "messages": [message], "tools": [tool]})

    assert ask(60).status_code == 200
    response = ask(100)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].function.parameters"
    assert "deeper than 64 levels" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://raylens.example", 200),
        ("https://known.example", 200),
        ("https://evil.example", 403),
        ("http://raylens.example.evil", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_may_not_call(origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    for environment in ({}, {"RAYLENS_API_KEYS": "key"}):
        sent = {**headers, **({"authorization": "Bearer key"} if environment else {})}
        assert client(environment).post("/detokenize", json={"tokens": [1]}, headers=sent).status_code == status


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("raylens.example", True),
        ("RAYLENS.example:8000", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("localhost:8000", True),
        ("raylens", True),
        ("raylens.default.svc.cluster.local:8000", True),
        ("gpu7.internal", True),
        ("rebound.example", False),
        ("rebound.example.:8000", False),
        ("127.0.0.1.rebound.example", False),
        ("internal.rebound.example", False),
        ("not-internal", True),
        ("rebound.notinternal", False),
    ],
)
def test_without_keys_a_name_that_anybody_may_have_registered_is_not_this_server(host: str, is_known: bool) -> None:
    """A page makes its own name resolve to a server of its reader's network: to the browser they are one site."""
    headers = {"host": host, "origin": f"http://{host}"}
    response = client().post("/detokenize", json={"tokens": [1]}, headers=headers)
    assert response.status_code == (200 if is_known else 403)
    assert is_known or "ingress.allowed_hosts" in response.json()["error"]["message"]
    sent = {**headers, "authorization": "Bearer key"}
    with_key = client({"RAYLENS_API_KEYS": "key"}).post("/detokenize", json={"tokens": [1]}, headers=sent)
    assert with_key.status_code == 200
    assert client().get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path", ["/health/", "http://testserver//health", "/health/x", "/HEALTH", "/health%2f..", "/healthz"]
)
def test_only_health_itself_is_open(path: str) -> None:
    assert client({"RAYLENS_API_KEYS": "key"}).get(path).status_code == 401
    assert client({"RAYLENS_API_KEYS": "key"}).options(path).status_code == 401


@pytest.mark.parametrize(("given", "taken"), [("my-id_7", True), ("", False), ("a b", False), ("x" * 65, False)])
def test_a_clients_id_is_taken_where_it_can_stand_in_a_log(given: str, taken: bool) -> None:
    found = client().post("/detokenize", json={"tokens": [1]}, headers={"x-request-id": given}).json()["id"]
    assert (found == given) == taken


def test_pictures_of_a_body_are_whole_behind_the_gate() -> None:
    urls = [data_url(os.urandom(200_000)) for _ in range(2)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    assert client().post("/chat", json=body).json() == urls


@pytest.mark.long
def test_texts_without_end_are_refused_and_pictures_are_not() -> None:
    def ask(content: str) -> Any:
        return client().post("/chat", json={"model": "m", "messages": [{"role": "user", "content": content}]})

    refused = ask('a "word" ' * 4_000_000)
    assert refused.status_code == 413
    assert "beside media in base64" in refused.json()["error"]["message"]
    assert ask("A" * 36_000_000).status_code == 200


@pytest.mark.parametrize(
    "headers", [{f"x-{number}": "y" for number in range(101)}, {"x": "y" * 17_000}], ids=["many", "large"]
)
def test_many_or_large_headers_are_refused_by_name(headers: dict[str, str]) -> None:
    for method, path in (("POST", "/detokenize"), ("GET", "/health")):
        refused = client().request(method, path, headers=headers)
        assert refused.status_code == 431
        assert refused.json()["error"]["code"] == "headers_too_large"
    assert "the limit is" in refused.json()["error"]["message"]


def test_a_byte_order_mark_before_json_is_no_part_of_it() -> None:
    body = b"\xef\xbb\xbf" + b'{"tokens": [1]}'
    assert client().post("/detokenize", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_does_not_say_it_is_json_is_told_to(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    refused = client().post("/detokenize", content=b'{"tokens": [1]}', headers=headers)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("content-type", "invalid_content_type")
    assert "application/json" in error["message"]


# What is counted and logged


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/detokenize", {"tokens": [1]}, None),
        ("/detokenize", {"tokens": "x"}, ("ingress", "invalid_value")),
        ("/detokenize", {"tokens": [1] * 300_000}, ("ingress", "body_too_large")),
        ("/nowhere", {}, ("ingress", "http_404")),
        ("/fail", {}, ("encode", "StageFailedError")),
        ("/crash", {}, ("ingress", "ZeroDivisionError")),
        ("/stream", {}, ("generate", "stage_unavailable")),
    ],
)
def test_every_request_that_fails_counts_once_with_its_kind(path: str, body: Any, kind: tuple[str, str] | None) -> None:
    sent = client()
    sent.post(path, json=body)
    assert sent.errors == ([] if kind is None else [kind])


def test_refusals_of_the_gate_count_too() -> None:
    locked = client({"RAYLENS_API_KEYS": "key"})
    assert locked.post("/detokenize", json={"tokens": [1]}).status_code == 401
    assert locked.errors == [("ingress", "invalid_api_key")]
    slow = client()
    slow.post("/detokenize", content=b"{", headers=JSON)
    assert slow.errors == [("ingress", "invalid_json")]


def test_the_log_names_fields_that_were_left_unread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raylens.deployments.endpoint.access_log")
    sent = client()
    answer = sent.post("/detokenize", json={"tokens": [1], "wizardry": 5, "a\nb": 6})
    assert answer.headers["x-raylens-ignored-fields"] == "wizardry, a%0Ab"
    sent.post("/detokenize", json={"tokens": [1]})
    named, plain = caplog.records
    assert named.getMessage().endswith(", fields unread: wizardry, 'a\\nb'")
    assert "unread" not in plain.getMessage()


def test_the_log_has_no_line_for_who_waits_for_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raylens.deployments.endpoint.access_log")
    sent = client()
    assert sent.get("/ping?states=ready,starting").status_code == 503
    assert caplog.records == []
    assert sent.get("/ping?states=starting,unresponsive").status_code == 503
    (failure,) = caplog.records
    assert "GET /ping 503" in failure.getMessage()


def test_the_log_has_a_line_for_each_request_and_a_cause_for_each_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raylens.deployments.endpoint.access_log")
    sent = client()
    sent.post("/detokenize", json={"tokens": [1]}, headers={"x-request-id": "my-id"})
    sent.get("/health")
    sent.post("/detokenize", json={"tokens": "x"})
    sent.post("/crash", json={})
    done, mistake, failure = caplog.records
    assert done.getMessage().startswith("POST /detokenize 200 my-id: 14 bytes in, ")
    assert (mistake.levelname, mistake.exc_info) == ("INFO", None)
    assert " 400 " in mistake.getMessage()
    assert "tokens" in mistake.getMessage()
    assert failure.levelname == "ERROR"
    assert failure.exc_info is not None
    assert failure.exc_info[0] is ZeroDivisionError


def test_every_answer_has_a_place_in_a_trace() -> None:
    trace_id, parent_id = "ab" * 16, "cd" * 8
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    for answer in (
        client().post("/stream", headers=headers),
        client().post("/crash", headers=headers),
        client({"RAYLENS_API_KEYS": "key"}).post("/stream", headers=headers),
    ):
        _, own_trace_id, span_id, _ = answer.headers["traceparent"].split("-")
        assert own_trace_id == trace_id
        assert span_id != parent_id
    others = {client().post("/stream").headers["traceparent"] for _ in range(2)}
    assert len({other.split("-")[1] for other in others}) == 2
    assert "traceparent" not in client().get("/health", headers=headers).headers
