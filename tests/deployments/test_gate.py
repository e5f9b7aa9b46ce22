"""What requests pass before their route: sizes, keys, origins. (Over HTTP: test_access.py.)"""

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from deployments.admission import Admission
from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.api.responses import ResponsesRequest
from deployments.api.tokens import DetokenizeRequest
from deployments.api_keys import ApiKeys
from deployments.config import AdmissionConfig
from deployments.errors import add_error_handlers
from deployments.gate import Gate

JSON = {"content-type": "application/json"}


def client(environment: dict[str, str] | None = None, **settings: Any) -> TestClient:
    api = FastAPI()
    config = AdmissionConfig.model_validate(settings)

    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        return {"held": request.state.ticket.held.bytes, "id": request.state.request_id}

    async def chat(body: ChatCompletionRequest) -> None: ...

    async def health() -> None: ...

    api.add_api_route("/detokenize", detokenize, methods=["POST"])
    api.add_api_route("/chat", chat, methods=["POST"])
    api.add_api_route("/health", health, methods=["GET"])
    add_error_handlers(api)
    keys = ApiKeys(None, environment or {})
    names: Any = {"origins": ["https://known.example"], "hosts": ["raylens.example"]}
    admission = Admission(config, lambda reason: None)
    api.add_middleware(Gate, keys=keys, admission=admission, config=config, **names)
    return TestClient(api, base_url="http://raylens.example")


def test_a_body_is_weighed_by_its_bytes() -> None:
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
        (ChatCompletionRequest, {**CHAT, "metadata": {f"x{n}": 1 for n in range(100_000)}}),
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
    response = ask(400)
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


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/x", "/HEALTH", "/health%2f..", "/healthz"])
def test_only_health_itself_is_open(path: str) -> None:
    assert client({"RAYLENS_API_KEYS": "key"}).get(path).status_code == 401
    assert client({"RAYLENS_API_KEYS": "key"}).options(path).status_code == 401


@pytest.mark.parametrize(("given", "taken"), [("my-id_7", True), ("", False), ("a b", False), ("x" * 65, False)])
def test_a_clients_id_is_taken_where_it_can_stand_in_a_log(given: str, taken: bool) -> None:
    found = client().post("/detokenize", json={"tokens": [1]}, headers={"x-request-id": given}).json()["id"]
    assert (found == given) == taken
