"""Which fields of a body are done, accepted, ignored or refused."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming as MessageParams
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams as EmbeddingParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponsesParams
from pydantic import BaseModel

from raylens.deployments.api.anthropic import MessagesRequest
from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.api.completions import CompletionRequest
from raylens.deployments.api.generation import StreamOptions
from raylens.deployments.api.pooling import EmbeddingsRequest
from raylens.deployments.api.responses import ResponsesRequest

HEADER = "x-raylens-ignored-fields"
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BATCHES = "/v1/batches"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "shapes", "messages": HELLO, "max_tokens": 2},
    COMPLETIONS: {"model": "shapes", "prompt": "Hello", "max_tokens": 2},
    RESPONSES: {"model": "shapes", "input": "Hello", "max_output_tokens": 2},
    INPUT_TOKENS: {"model": "shapes", "input": "Hello"},
    MESSAGES: {"model": "shapes", "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": "shapes", "messages": HELLO},
    BATCHES: {"endpoint": CHAT, "completion_window": "24h"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/render": {"prompt": "Hello"},
    "/v1/embeddings": {"model": "shapes", "input": "Hello"},
    "/v1/rerank": {"model": "shapes", "query": "Hello", "documents": ["Hello"]},
    "/v1/score": {"model": "shapes", "queries": "Hello", "documents": ["Hello"]},
}
REQUESTS: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
}


def post(app_url: str, path: str, **fields: Any) -> httpx.Response:
    if path == BATCHES:
        sent = httpx.post(f"{app_url}/v1/files", files={"file": ("in.jsonl", b"{}")}, data={"purpose": "batch"})
        fields["input_file_id"] = sent.json()["id"]
    return httpx.post(f"{app_url}{path}", json={**LEAST[path], **fields}, timeout=60)


def wire_names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (ChatParams, ChatCompletionRequest),
        (CompletionParams, CompletionRequest),
        (ResponsesParams, ResponsesRequest),
        (ChatCompletionStreamOptionsParam, StreamOptions),
        (MessageParams, MessagesRequest),
        (EmbeddingParams, EmbeddingsRequest),
    ],
)
def test_every_field_of_the_official_client_is_known(params: Any, model: type[BaseModel]) -> None:
    """Done, accepted or refused, but never ignored as if nobody had heard of it."""
    assert params.__annotations__.keys() - wire_names(model) == set()


VLLM = {
    "top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens",
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids",
    "bad_words use_beam_search add_special_tokens response_format priority request_id mm_processor_kwargs",
    "structured_outputs guided_json guided_regex guided_choice guided_grammar logits_processors return_token_ids",
    "return_tokens_as_token_ids cache_salt kv_transfer_params vllm_xargs echo",
}
VLLM_CHAT = {
    "add_generation_prompt continue_final_message documents chat_template chat_template_kwargs include_reasoning",
    "reasoning_effort media_io_kwargs max_completion_tokens thinking_token_budget repetition_detection",
}


def test_every_field_of_vllm_is_known() -> None:
    fields = set(" ".join(VLLM).split())
    assert fields - wire_names(CompletionRequest) == set()
    assert (fields | set(" ".join(VLLM_CHAT).split())) - wire_names(ChatCompletionRequest) == set()


def test_the_documented_table_has_every_field() -> None:
    table = Path("docs/http.md").read_text().partition("## Fields")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    known = set().union(*(wire_names(model) for model in REQUESTS.values()))
    assert known - told == set()
    assert told - known == set()


@pytest.mark.parametrize("path", LEAST)
def test_unknown_fields_are_ignored_and_named(app_url: str, path: str) -> None:
    answer = post(app_url, path, wizardry=5, **{"naïve, or\nnot": {"deep": 1}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "wizardry, na%C3%AFve%2C%20or%0Anot"
    plain = post(app_url, path)
    assert HEADER not in plain.headers
    refused = post(app_url, path, strict_fields=True, wizardry=5, sorcery=None)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("wizardry", "unknown_parameter")
    assert "sorcery" in error["message"]
    assert post(app_url, path, strict_fields=True).status_code == 200


def test_every_route_with_a_json_body_follows_the_policy(app_url: str) -> None:
    paths = httpx.get(f"{app_url}/openapi.json").json()["paths"]
    with_json = {
        path
        for path, methods in paths.items()
        for said in methods.values()
        if "application/json" in said.get("requestBody", {}).get("content", {})
    }
    assert with_json == LEAST.keys() | {"/classify"}  # of which this model has no classes


def test_unknown_fields_are_named_where_they_are(app_url: str) -> None:
    parts = [{"type": "text", "text": "Hi", "colour": 1}, {"type": "text", "text": "Ho", "colour": 1, "shade": 2}]
    first: dict[str, Any] = {"role": "user", "content": parts, "mood": "good"}
    messages = [first, {**first, "content": "Hi"}]
    fields: dict[str, Any] = {"messages": messages, "response_format": {"type": "text", "x": 0}}
    named = "messages[0].content[0].colour, messages[0].content[1].shade"
    answer = post(app_url, CHAT, **fields)
    assert set(answer.headers[HEADER].split(", ")) == {
        "messages[0].mood",
        "messages[0].content[0].colour",
        "messages[0].content[1].shade",
        "response_format.x",
    }
    assert answer.json()["choices"] == post(app_url, CHAT, messages=[strip(one) for one in messages]).json()["choices"]
    refused = post(app_url, CHAT, **fields, strict_fields=True).json()["error"]
    assert all(name in refused["message"] for name in named.split(", "))


def strip(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [{"type": "text", "text": part["text"]} for part in content]
    return {"role": message["role"], "content": content}


def test_streams_and_errors_name_ignored_fields_too(app_url: str) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        streamed = post(app_url, path, stream=True, wizardry=1)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers[HEADER] == "wizardry"
    failed = post(app_url, CHAT, model="other", wizardry=1)
    assert (failed.status_code, failed.headers[HEADER]) == (404, "wizardry")


def test_many_ignored_fields_make_one_short_header(app_url: str) -> None:
    answer = post(app_url, CHAT, **{f"field{number}": 1 for number in range(60)})
    assert answer.headers[HEADER].endswith("field19, and 40 more")
    assert post(app_url, CHAT, **{f"field{number}": 1 for number in range(300)}).status_code == 400


@pytest.mark.parametrize("path", REQUESTS)
def test_null_is_accepted_for_every_optional_field(app_url: str, path: str) -> None:
    optional = {
        field.alias or name
        for name, field in REQUESTS[path].model_fields.items()
        if not field.is_required() and name not in LEAST[path]
    }
    answer = post(app_url, path, **{**dict.fromkeys(optional), "strict_fields": True})
    assert answer.status_code == 200, answer.text


HARMLESS: dict[str, dict[str, Any]] = {
    CHAT: {
        "reasoning_effort": "low",
        "prompt_cache_key": "mine",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "safety_identifier": "me",
        "verbosity": "low",
        "modalities": ["text"],
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "prediction": {"type": "content", "content": "Hello"},
        "stop": None,
        "audio": None,
        "functions": [],
        "use_beam_search": False,
    },
    COMPLETIONS: {"user": "me", "best_of": 1, "suffix": None, "add_special_tokens": True},
    RESPONSES: {
        "include": [],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "service_tier": "default",
        "prompt_cache_key": "mine",
        "safety_identifier": "me",
        "text": {"verbosity": "low"},
        "metadata": {"a": "b"},
        "background": False,
        "tools": [],
        "tool_choice": "auto",
        "max_tool_calls": 5,
    },
}


@pytest.mark.parametrize("path", HARMLESS)
def test_what_cannot_change_the_answer_does_not(app_url: str, path: str) -> None:
    answer = post(app_url, path, **HARMLESS[path], strict_fields=True)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    assert said(answer.json()) == said(post(app_url, path).json())


def said(answer: dict[str, Any]) -> Any:
    """What the model has said in an answer, of whichever API."""
    if "choices" in answer:
        return [choice.get("message") or choice["text"] for choice in answer["choices"]]
    return [[part["text"] for part in item["content"]] for item in answer["output"]]


REFUSED = [
    (CHAT, {"audio": {"voice": "a", "format": "wav"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities[1]"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"moderation": {"model": "m"}}, "moderation"),
    (COMPLETIONS, {"best_of": 5}, "body"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"previous_response_id": ""}, "previous_response_id"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include[0]"),
    (RESPONSES, {"top_logprobs": 5}, "top_logprobs"),
    (RESPONSES, {"guided_json": {"type": "object"}}, "guided_json"),
    (MESSAGES, {"container": "c"}, "container"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    (RESPONSES, {"input": [{"type": ["message"], "role": "user", "content": "Hi"}]}, "input[0]"),
    (RESPONSES, {"input": ["Hi"]}, "input[0]"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=lambda value: value if "/" in value else None)
def test_what_would_change_the_answer_is_refused_by_name(
    app_url: str, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(app_url, path, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
    assert next(iter(fields)) in answer.json()["error"]["message"]


def test_history_as_other_servers_wrote_it(app_url: str) -> None:
    said_before: dict[str, Any] = {"role": "assistant", "content": "Hi."}
    other = {
        **said_before,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "The user greets.",
        "reasoning": None,
    }
    forms: list[dict[str, Any]] = [
        other,
        {"role": "assistant", "content": None, "refusal": "Hi."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Hi."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]},
    ]
    expected = post(app_url, CHAT, messages=[*HELLO, said_before, *HELLO]).json()
    for form in forms:
        answer = post(app_url, CHAT, messages=[*HELLO, form, *HELLO], strict_fields=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"] == expected["usage"]
        assert said(answer.json()) == said(expected)
    silent = {"role": "assistant", "content": None}
    assert post(app_url, CHAT, messages=[*HELLO, silent, *HELLO]).status_code == 200
    assert post(app_url, CHAT, messages=[{"role": "user", "content": None}]).status_code == 400
    # The same of the Responses API.
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AAAA"}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": "Hi."}],
        [thought, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "Hi."}]}],
        [
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "phase": "final_answer",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}],
            }
        ],
    ]
    answers = [post(app_url, RESPONSES, input=[*HELLO, *turn, *HELLO], strict_fields=True) for turn in turns]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[1].text
    assert len({answer.json()["usage"]["input_tokens"] for answer in answers}) == 1
    assert answers[0].json()["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_request_id_of_the_body_makes_up_the_answers(app_url: str) -> None:
    prefixes = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}
    for path, prefix in prefixes.items():
        assert post(app_url, path, request_id="my-own_1").json()["id"] == f"{prefix}my-own_1"
    assert post(app_url, CHAT, request_id="a b").json()["error"]["param"] == "request_id"
