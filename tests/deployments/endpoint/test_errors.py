"""What a client is told of an error, and what stays in the log."""

import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.api.completions import CompletionRequest
from raylens.deployments.endpoint.admission import OverloadedError
from raylens.deployments.endpoint.errors import AccessError, add_error_handlers, error_response, response_for
from raylens.deployments.stages.stage_calls import StageFailedError, StageUnavailableError
from raylens.preprocess.schema import InvalidRequestError

SECRET = "/srv/secret/models at 0x7f3a2c"


@pytest.mark.parametrize("error", [ValueError(SECRET), RuntimeError(SECRET), StageFailedError("encode", SECRET)])
def test_internals_stay_in_the_log(error: Exception) -> None:
    status, body = error_response(error)
    assert status == 500
    assert body.error.message == "internal error, see the server's log"
    assert SECRET not in body.model_dump_json()


def test_each_kind_of_error_has_its_status_and_headers() -> None:
    refused = InvalidRequestError("must be less", field="n", code="too_many", status=413)
    assert response_for(refused).status_code == 413
    assert json.loads(bytes(response_for(refused).body))["error"] == {
        "message": "n: must be less",
        "type": "invalid_request_error",
        "param": "n",
        "code": "too_many",
    }
    full = response_for(OverloadedError("no room", reason="pixels", retry_after_s=2.2))
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    gone = response_for(StageUnavailableError("encode", "the encode stage is not available"))
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "2")
    unknown = response_for(AccessError("no API key was sent", status=401, challenge="Bearer"))
    assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")


@pytest.fixture(scope="module")
def client() -> TestClient:
    api = FastAPI()

    async def chat(body: ChatCompletionRequest) -> None: ...
    async def completion(body: CompletionRequest) -> None: ...

    api.add_api_route("/chat", chat, methods=["POST"])
    api.add_api_route("/completion", completion, methods=["POST"])
    add_error_handlers(api)
    return TestClient(api)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat", {}, "messages"),
        (
            "/chat",
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            "/chat",
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages[0].content[0]",
        ),
        ("/chat", {"model": "m", "messages": [], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ("/chat", {"model": "m", "messages": [], "logit_bias": {"x": 1}}, "logit_bias.x"),
        ("/completion", {"model": "m", "prompt": ["a", 5]}, "prompt[1]"),
        ("/completion", {"model": "m", "prompt": [1, -1]}, "prompt[1]"),
        ("/completion", {"model": "m", "prompt": "a", "multi_modal_data": {"image": 5}}, "multi_modal_data.image"),
    ],
)
def test_the_field_that_is_wrong_is_named(client: TestClient, path: str, body: Any, field: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
