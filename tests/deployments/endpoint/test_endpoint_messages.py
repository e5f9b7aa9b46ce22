"""Anthropic's Messages API by its official client: pictures, tools, streams, thoughts of the history, errors."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from openai import OpenAI

from raylens.checkpoints import PICTURES
from raylens.deployments.api.anthropic import MessagesRequest
from raylens.preprocess.schema import ChatPrompt
from tests.deployments.endpoint.test_endpoint_tools import app_config as app_config
from tests.pictures import user_message

PICTURE = (PICTURES / "one.png").read_bytes()
QUESTION = "How many shapes are there?"
GREEDY = {"temperature": 0}  # no argument of the client's any more
WEATHER: Any = {
    "name": "weather",
    "description": "the weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def api(app_url: str) -> Iterator[anthropic.resources.Messages]:
    with anthropic.Anthropic(base_url=app_url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client.messages


def picture_block() -> Any:
    data = base64.b64encode(PICTURE).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def asked(*content: Any) -> Any:
    return {"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}


def ask(api: anthropic.resources.Messages, **options: Any) -> Any:
    options = {"max_tokens": 30, "extra_body": GREEDY, "messages": [asked(picture_block())], **options}
    return api.create(model="shapes", **options)


def test_a_picture_is_answered_as_in_chat_completions(api: anthropic.resources.Messages, client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="shapes", messages=[user_message(QUESTION, PICTURE)], max_tokens=30, temperature=0
    )
    answer = ask(api)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert (answer.type, answer.role, answer.stop_reason, answer.stop_sequence) == (
        *("message", "assistant"),
        *("end_turn", None),
    )
    assert chat.usage is not None
    told = answer.usage
    assert told.input_tokens + told.cache_read_input_tokens == chat.usage.prompt_tokens
    assert told.output_tokens == chat.usage.completion_tokens
    counted = api.count_tokens(model="shapes", messages=[asked(picture_block())])
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_an_answer_streams(api: anthropic.resources.Messages) -> None:
    whole = ask(api)
    options: Any = {"max_tokens": 30, "extra_body": GREEDY, "messages": [asked(picture_block())]}
    with api.stream(model="shapes", **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.content[0].type, final.stop_reason) == ("text", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in ask(api, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_the_end_of_an_answer_is_named(api: anthropic.resources.Messages) -> None:
    free = ask(api).content[0].text
    assert ask(api, max_tokens=1).stop_reason == "max_tokens"
    stop = free[2:4]
    stopped = ask(api, stop_sequences=["zq", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == free.partition(stop)[0]
    assert ask(api, max_tokens=10**6).content[0].text == free, "the context is the limit"


def test_a_tool_is_called_and_its_result_may_be_a_picture(api: anthropic.resources.Messages) -> None:
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    options: Any = {"tools": [WEATHER], "max_tokens": 200}
    answer = ask(api, tool_choice=choice, **options)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Rome", "Paris")
    with api.stream(
        model="shapes", messages=[asked(picture_block())], extra_body=GREEDY, tool_choice=choice, **options
    ) as stream:
        assert stream.get_final_message().content[0].input == call.input  # type: ignore[union-attr]
    turns = [asked(), {"role": "assistant", "content": [call.model_dump()]}]
    sizes = []
    for content in ("5", [{"type": "text", "text": "5"}, picture_block()]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        after = ask(api, messages=[*turns, {"role": "user", "content": [result]}], tools=[WEATHER], max_tokens=1)
        sizes.append(after.usage.input_tokens + after.usage.cache_read_input_tokens)
    assert sizes[1] > sizes[0] + 10, "the picture's tokens"


@pytest.mark.parametrize("kind", ["any", "none", "auto"])
def test_the_choice_of_tools_is_obeyed(api: anthropic.resources.Messages, kind: str) -> None:
    kinds = {block.type for block in ask(api, tools=[WEATHER], tool_choice={"type": kind}, max_tokens=80).content}
    assert kinds == {"tool_use" if kind == "any" else "text"}


def test_a_schema_holds(api: anthropic.resources.Messages) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = ask(api, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=300)
    assert json.loads(answer.content[0].text)["n"] in (1, 2)


def test_a_request_of_claude_code_is_answered(app_url: str) -> None:
    """Its fields as it sends them, with shorter texts and one of its tools."""
    body = {
        "model": "shapes",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
                    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "# Environment\nThe shell is bash."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "toolu_2", "name": "ToolSearch", "input": {"query": "select:Look"}}
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "tool_reference", "tool_name": "Look"}],
                        "cache_control": {"type": "ephemeral"},
                    },
                ],
            },
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                },
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"name": "Look", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True},
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive", "display": "updates"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
    }
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    answer = httpx.post(f"{app_url}/v1/messages?beta=true", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.text.startswith("event: message_start\n")
    assert "event: message_stop\n" in answer.text
    assert answer.headers["x-raylens-ignored-fields"] == "messages[1].cache_control, tools[1].web_search_20250305"


def test_a_deferred_tool_is_offered_once_a_message_names_it() -> None:
    deferred = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    added, removed = (
        {"type": kind, "tool": {"type": "tool_reference", "name": "later"}}
        for kind in ("tool_addition", "tool_removal")
    )
    found = {"type": "tool_reference", "tool_name": "later"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found]}

    def offered(*blocks: Any) -> list[str]:
        messages = [asked(), *({"role": "user", "content": [block]} for block in blocks)]
        body = {"model": "m", "max_tokens": 1, "messages": messages, "tools": [WEATHER, deferred]}
        return [tool.function.name for tool in MessagesRequest.model_validate(body).offered.tools]

    assert offered() == ["weather"]
    assert offered(added) == offered(result) == offered(result, removed, added) == ["weather", "later"]
    assert offered(added, removed) == ["weather"]
    assert offered({**result, "content": "later"}) == ["weather"]


def test_a_search_that_another_server_would_do_offers_all_tools() -> None:
    deferred = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    body = {"model": "m", "max_tokens": 1, "messages": [asked()], "tools": [search, deferred]}
    (tool,) = MessagesRequest.model_validate(body).offered.tools
    assert tool.function.name == "later"


def test_a_change_of_tools_is_no_answer_to_go_on_with() -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I can"}]
    for last in ([], [{"role": "system", "content": [change]}]):
        ((prompt, _),) = MessagesRequest.model_validate(
            {"model": "m", "max_tokens": 1, "messages": [*said, *last]}
        ).prompts_and_media()
        assert isinstance(prompt, ChatPrompt)
        assert prompt.continue_final_message == (not last)


def test_what_a_search_found_is_text() -> None:
    found = {
        "type": "search_result",
        "title": "Cats",
        "source": "https://cats.example",
        "content": [{"type": "text", "text": "They purr."}],
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found, picture_block()]}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [result, found, found]}]}
    ((prompt, media),) = MessagesRequest.model_validate(body).prompts_and_media()
    assert isinstance(prompt, ChatPrompt)
    said = {"type": "text", "text": "Cats\nhttps://cats.example\nThey purr.\n"}
    told, asked_for = prompt.messages
    assert (told["role"], told["content"]) == ("tool", [said, {"type": "image"}])
    assert (asked_for["role"], asked_for["content"]) == ("user", [said, said])
    assert [one.field for one in media] == ["messages[0].content[0].content[1].image"]


def test_errors_have_the_apis_own_form(api: anthropic.resources.Messages, app_url: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.create(model="other", max_tokens=1, messages=[asked()])
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    call = {"type": "tool_use", "id": "a", "name": "f"}
    change = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    for wrong, field in (
        ({"messages": []}, "messages"),
        (
            {"messages": [asked({"type": "image", "source": {"type": "base64", "media_type": "x", "data": "%"}})]},
            "image",
        ),
        ({"messages": [asked()], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [asked()], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [change]}]}, "messages: they change tools and say nothing"),
        ({"messages": [{"role": "user", "content": [{**call, "input": {}}]}]}, "role assistant only"),
        ({"messages": [{"role": "user", "content": [{**call, "input": 5}]}]}, "messages[0].content[0].input"),
    ):
        answer = httpx.post(f"{app_url}/v1/messages", json={"model": "shapes", "max_tokens": 1, **wrong}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert field in answer.json()["error"]["message"]
