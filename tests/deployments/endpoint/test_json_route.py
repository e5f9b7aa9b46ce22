"""How bodies become JSON."""

import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from raylens.deployments.endpoint.json_route import JsonRoute
from tests.gated import gated


@pytest.fixture(scope="module")
def client() -> TestClient:
    api = FastAPI()
    api.router.route_class = JsonRoute

    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    api.add_api_route("/echo", echo, methods=["POST"])
    client = gated(api)
    client.headers["content-type"] = "application/json"
    return client


@pytest.mark.parametrize(
    "value", [{}, {"a": [1, -2.5, 1e300, 10**25, None, True, "\N{GRINNING FACE}\0"]}, {"": {"": []}}]
)
def test_what_is_json_comes_through(client: TestClient, value: Any) -> None:
    assert client.post("/echo", content=json.dumps(value)).json() == value
    assert client.post("/echo", content=json.dumps(value, ensure_ascii=False).encode()).json() == value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": ', "EOF while parsing a value at line 1 column 6"),
        (b'{"a": "\\ud800"}', "unexpected end of hex escape at line 1 column 14"),
        (b'{"a": "\xff"}', "invalid unicode code point at line 1 column "),
        (b'{"a": ' + b"[" * 250 + b"]" * 250 + b"}", "recursion limit exceeded at line 1 column 207"),
    ],
)
def test_what_is_not_says_where(client: TestClient, body: bytes, reason: str) -> None:
    response = client.post("/echo", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["message"].startswith(f"body: not valid JSON: {reason}")
