"""Calls of tools over HTTP, by a model whose chat template knows them."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deployments.config import AppConfig
from tests.pictures import user_message

# What a template of Qwen's does with tools, as far as it matters here.
TOOLS = (
    "{%- if tools -%}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '\\nAnswer <tool_call>\\n{...}\\n</tool_call>\\n' -}}{%- endif -%}"
)
CALLS = (
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' -}}{%- endfor -%}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def app_config(shapes: str, tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    folder = tmp_path_factory.mktemp("with-tools") / "shapes"
    folder.mkdir()
    for file in Path(shapes).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = (folder / "chat_template.jinja").read_text()
    template = template.replace("{{- tail -}}", CALLS + "{{- tail -}}").replace(
        "'user' -%}", "'user' or message['role'] == 'tool' -%}"
    )
    (folder / "chat_template.jinja").write_text(TOOLS + template)
    return AppConfig.model_validate({"model": str(folder)})


def ask(client: OpenAI, **options: Any) -> Any:
    options = {"messages": [user_message("Weather?")], "tools": [WEATHER, TIME], "max_tokens": 200, **options}
    return client.chat.completions.create(model="shapes", **options)


def check_weather(call: Any) -> None:
    assert (call.type, call.function.name) == ("function", "weather")
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Rome", "Paris")
    assert 1 <= arguments["days"] <= 9


def test_a_named_tool_is_called(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, tool_choice=named, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.model_fields_set == {"role", "content", "refusal", "tool_calls"}
    (call,) = choice.message.tool_calls
    check_weather(call)
    # The conversation goes on with the call and what came of it.
    history: Any = [
        user_message("Weather?"),
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert ask(client, messages=history, tool_choice="none").choices[0].message.tool_calls is None


def test_a_call_streams_whole(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    events = list(ask(client, tool_choice=named, parallel_tool_calls=False, stream=True))
    calls = [call for event in events for choice in event.choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0]
    check_weather(calls[0])
    assert [choice.finish_reason for event in events for choice in event.choices][-1] == "tool_calls"
    # The official client's own reader of such streams.
    options: Any = {"tools": [WEATHER, TIME], "tool_choice": named, "parallel_tool_calls": False, "max_tokens": 200}
    with client.chat.completions.stream(model="shapes", messages=[user_message("Weather?")], **options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    check_weather(message.tool_calls[0])


def test_one_of_all_tools_is_called_where_one_has_to_be(client: OpenAI) -> None:
    choice = ask(client, tool_choice="required").choices[0]
    assert choice.message.tool_calls or choice.finish_reason == "length"
    for call in choice.message.tool_calls or []:
        assert call.function.name in ("weather", "time")


def test_the_model_may_answer_in_text_where_it_need_not_call(client: OpenAI) -> None:
    choice = ask(client).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content
