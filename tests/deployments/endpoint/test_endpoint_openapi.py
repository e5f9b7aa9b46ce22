"""What `/openapi.json` says is complete and true: requests made from it never fail the server, and its answers are of
the forms that it names."""

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_route_is_described(app_url: str) -> None:
    paths = httpx.get(f"{app_url}/openapi.json").json()["paths"]
    assert {path: sorted(methods) for path, methods in paths.items()} == {
        "/v1/chat/completions": ["post"],
        "/v1/completions": ["post"],
        "/v1/responses": ["post"],
        "/v1/responses/input_tokens": ["post"],
        "/v1/responses/{response_id}": ["delete", "get"],
        "/v1/responses/{response_id}/cancel": ["post"],
        "/v1/responses/{response_id}/input_items": ["get"],
        "/v1/messages": ["post"],
        "/v1/messages/count_tokens": ["post"],
        "/v1/embeddings": ["post"],
        "/v1/rerank": ["post"],
        "/v1/score": ["post"],
        "/classify": ["post"],
        "/v1/models": ["get"],
        "/v1/models/{model}": ["get"],
        "/v1/files": ["get", "post"],
        "/v1/files/{file_id}": ["delete", "get"],
        "/v1/files/{file_id}/content": ["get"],
        "/v1/batches": ["get", "post"],
        "/v1/batches/{batch_id}": ["get"],
        "/v1/batches/{batch_id}/cancel": ["post"],
        "/tokenize": ["post"],
        "/detokenize": ["post"],
        "/render": ["post"],
        "/version": ["get"],
        "/health": ["get"],
        "/ping": ["get"],
        "/metrics": ["get"],
    }
    for path, methods in paths.items():
        for method, said in methods.items():
            assert said.get("description"), f"{method} {path} is not explained"


def test_generated_requests_never_fail_the_server(app_url: str, client: OpenAI) -> None:
    send_generated(app_url, client, 150)


@pytest.mark.slow
def test_three_thousand_generated_requests(app_url: str, client: OpenAI) -> None:
    # Of routes without a body there are not as many different ones as there might be.
    assert send_generated(app_url, client, 3800) >= 3000


def send_generated(app_url: str, client: OpenAI, number: int) -> int:
    """How many there were, `number` at most."""
    schema: Any = schemathesis.openapi.from_url(f"{app_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    # Those with a body have most to be got wrong.
    weights = {operation.label: 6 if operation.body else 1 for operation in operations}
    statuses: Counter[int] = Counter()
    for operation in operations:
        num_examples = max(1, number * weights[operation.label] // sum(weights.values()))
        statuses += _send(operation, num_examples, app_url)
    assert sum(statuses.values()) >= number * 0.8, statuses
    assert statuses[200] > 0 < statuses[400]
    assert client.chat.completions.create(model="shapes", messages=[{"role": "user", "content": "Hi"}]).choices
    return sum(statuses.values())


def _send(operation: Any, num_examples: int, app_url: str) -> Counter[int]:
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(), is_served=st.booleans())
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any, is_served: bool) -> None:
        if isinstance(case.body, dict) and _is_short_time(case.body.get("timeout_s")):
            case.body["timeout_s"] = 60  # one that no request keeps is a 504, as it should be
        if is_served and isinstance(case.body, dict):
            # Else nearly all would end at the model's name, and the rest go on to the context's end.
            case.body.update({"model": "shapes"} if "model" in case.body else {})
            limit = "max_output_tokens" if operation.path == "/v1/responses" else "max_tokens"
            case.body.update({limit: 3} if operation.path.startswith("/v1/") else {})
        response = case.call(base_url=app_url, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()
    return statuses


def _is_short_time(seconds: object) -> bool:
    return isinstance(seconds, float | int) and 0 < seconds < 60
