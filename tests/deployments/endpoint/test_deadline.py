"""The time that a client gives a request: at its end everything ends, with an error that says so."""

import time
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from tests.metric_values import gauge
from tests.waiting import wait_until

LONG: dict[str, Any] = {
    "model": "shapes",
    "prompt": "Hello",
    "max_tokens": 2000,
    "n": 16,
    "ignore_eos": True,
}  # seconds of work


def num_running(app_url: str) -> float:
    return gauge(app_url, "num_requests_running")


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"timeout_s": 0.3}, {}),
        ({}, {"x-request-timeout-s": "0.3"}),
        ({"timeout_s": 0.3}, {"x-request-timeout-s": "60"}),
    ],
    ids=["field", "header", "the field goes before"],
)
def test_a_request_that_takes_longer_is_given_up_in_every_stage(
    app_url: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    started = time.monotonic()
    answer = httpx.post(f"{app_url}/v1/completions", json=LONG | fields, headers=headers, timeout=60)
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": "the request has taken 0.3 s, the time that it gave",
        "type": "timeout_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert time.monotonic() - started < 5
    wait_until(lambda: num_running(app_url) == 0)


def test_a_stream_ends_with_an_error_event(client: OpenAI, app_url: str) -> None:
    body = {"ignore_eos": True, "timeout_s": 0.5}
    stream = client.completions.create(
        model="shapes", prompt="Hello", max_tokens=2000, n=16, stream=True, extra_body=body
    )
    with pytest.raises(APIError, match="the time that it gave"):
        for _ in stream:
            pass
    wait_until(lambda: num_running(app_url) == 0)


@pytest.mark.parametrize("header", ["soon", "0", "-1", "nan", "inf", "86401"])
def test_a_header_that_is_no_time_is_refused(app_url: str, header: str) -> None:
    answer = httpx.post(f"{app_url}/v1/completions", json=LONG, headers={"x-request-timeout-s": header})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout-s"


@pytest.mark.parametrize("seconds", [0, -1, 86_401])
def test_a_field_that_is_no_time_is_refused(app_url: str, seconds: float) -> None:
    answer = httpx.post(f"{app_url}/v1/completions", json=LONG | {"timeout_s": seconds})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout_s"


def test_a_request_that_takes_less_is_answered(app_url: str) -> None:
    body = LONG | {"max_tokens": 2, "timeout_s": 60}
    assert httpx.post(f"{app_url}/v1/completions", json=body).status_code == 200
