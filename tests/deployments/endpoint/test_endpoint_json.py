"""Answers and errors as JSON: which fields are null, which are absent, and by which name an error calls a field."""

import json
from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = 10**5


def post(app_url: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{app_url}{path}", json={"model": "shapes", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def events(app_url: str, path: str, **body: Any) -> list[Any]:
    text = httpx.post(f"{app_url}{path}", json={"model": "shapes", "stream": True, **body}, timeout=60).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def test_a_chat_completion_has_openai_s_nulls_and_nothing_of_extensions(app_url: str) -> None:
    answer = post(app_url, "/v1/chat/completions", messages=HELLO, max_tokens=4)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    # What came out goes in again as it is.
    post(app_url, "/v1/chat/completions", messages=[*HELLO, answer["choices"][0]["message"], *HELLO], max_tokens=1)


def test_chunks_have_openai_s_nulls(app_url: str) -> None:
    options = {"messages": HELLO, "max_tokens": 4, "stream_options": {"include_usage": True}}
    *chunks, last = events(app_url, "/v1/chat/completions", **options)
    assert all(set(chunk) == {"id", "object", "created", "model", "choices", "usage"} for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [set(choice["delta"]) for choice in choices[1:]] == [{"content"}] * (len(choices) - 2) + [set()]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_completions_have_openai_s_nulls(app_url: str) -> None:
    whole = post(app_url, "/v1/completions", prompt="Hello", max_tokens=3)
    parts = events(app_url, "/v1/completions", prompt="Hello", max_tokens=3)
    for one in (whole, *parts):
        assert set(one) == {"id", "object", "created", "model", "choices", "usage"}
        assert set(one["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_responses_have_openai_s_nulls(app_url: str) -> None:
    required = {"id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"}
    required |= {"parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p", "usage", "status"}
    answer = post(app_url, "/v1/responses", input="Hello")
    assert required <= set(answer)
    assert (answer["error"], answer["instructions"]) == (None, None)
    assert "stage_timings" not in answer
    told = events(app_url, "/v1/responses", input="Hello")
    for event in told:
        if "response" in event:
            assert required <= set(event["response"])
        else:
            assert None not in event.values()
    assert set(told[0]) == {"type", "sequence_number", "response"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": ENDLESS}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": ENDLESS}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
            },
            "response_format.json_schema.schema",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("/v1/chat/completions", {"messages": HELLO, "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ("/v1/chat/completions", {"messages": HELLO, "structured_outputs": {}}, "structured_outputs"),
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt"),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": ENDLESS}, "max_tokens"),
        ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 99}, "logprobs"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": ENDLESS}, "max_output_tokens"),
        ("/v1/responses", {"input": "word " * 5000}, "input"),
        (
            "/v1/responses",
            {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "text.format.schema",
        ),
    ],
)
def test_an_error_calls_a_field_as_its_api_does(app_url: str, path: str, body: Any, field: str) -> None:
    response = httpx.post(app_url + path, json={"model": "shapes", **body}, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert response.json()["error"]["message"].startswith(f"{field}: ")
