"""Calls of tools over HTTP, by a model whose chat template knows them, and reads a variable of the client's."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from raylens.checkpoints import PICTURES
from raylens.deployments.config import AppConfig
from tests.deployments.endpoint.recorded_bodies import WITH_TOOLS, assert_is_answered
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
MOOD = "{%- if mood is defined -%}{{- 'Be ' ~ mood ~ '.\\n' -}}{%- endif -%}"
TOO_LONG = "{%- if mood == 'endless' -%}{{- 'a' * 10**10 -}}{%- endif -%}"
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
    (folder / "chat_template.jinja").write_text(MOOD + TOO_LONG + TOOLS + template)
    # Clients that name no length get an answer as long as the context.
    return AppConfig.model_validate({"model": str(folder), "encode": {"placement": "inline"}, "max_model_len": 800})


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


def test_the_arguments_of_a_call_stream_as_they_are_written(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    events = list(ask(client, tool_choice=named, parallel_tool_calls=False, stream=True))
    calls = [call for event in events for choice in event.choices for call in choice.delta.tool_calls or []]
    assert len(calls) > 3
    first, *others = calls
    assert (first.index, first.type, first.function.name) == (0, "function", "weather")
    assert first.id is not None
    assert {(call.index, call.id, call.type, call.function.name) for call in others} == {(0, None, None, None)}
    first.function.arguments = "".join(call.function.arguments for call in calls)
    check_weather(first)
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


WEATHER_ITEM: Any = {"type": "function", **WEATHER["function"], "strict": False}
TIME_ITEM: Any = {"type": "function", "name": "time", "parameters": None, "strict": None}


def respond(client: OpenAI, **options: Any) -> Any:
    options = {"input": "Weather?", "tools": [WEATHER_ITEM, TIME_ITEM], "max_output_tokens": 200, **options}
    return client.responses.create(model="shapes", **options)


def check_weather_item(call: Any) -> None:
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments).keys() == {"city", "days"}


def test_a_named_tool_is_called_in_the_responses_api(client: OpenAI) -> None:
    named = {"type": "function", "name": "weather"}
    answer = respond(client, tool_choice=named, parallel_tool_calls=False)
    assert answer.status == "completed"
    assert answer.tool_choice.model_dump() == named
    assert [tool.name for tool in answer.tools] == ["weather", "time"]
    (call,) = answer.output
    check_weather_item(call)
    history: Any = [
        {"role": "user", "content": "Weather?"},
        *[item.model_dump() for item in answer.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    after = respond(client, input=history, tool_choice="none")
    assert [item.type for item in after.output] == ["message"]
    # The same conversation as a chat completion's.
    chat: Any = [
        user_message("Weather?"),
        {
            "role": "assistant",
            "tool_calls": [{"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    assert ask(client, messages=chat, tool_choice="none").usage.prompt_tokens == after.usage.input_tokens


def test_calls_stream_in_the_responses_api(client: OpenAI) -> None:
    named: Any = {"type": "function", "name": "weather"}
    events = list(respond(client, tool_choice=named, parallel_tool_calls=False, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    check_weather_item(events[-1].response.output[0])
    assert "".join(deltas) == events[-3].arguments == events[-2].item.arguments
    with client.responses.stream(
        model="shapes", input="Weather?", tools=[WEATHER_ITEM], tool_choice=named, parallel_tool_calls=False
    ) as stream:
        check_weather_item(stream.get_final_response().output[0])


def test_one_of_all_tools_is_called_in_the_responses_api(client: OpenAI) -> None:
    answer = respond(client, tool_choice="required")
    assert answer.output[0].type == "function_call" or answer.status == "incomplete"
    assert {item.name for item in answer.output if item.type == "function_call"} <= {"weather", "time"}
    assert respond(client).output[0].type == "message"


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_recorded_bodies_with_tools_are_answered(app_url: str, name: str) -> None:
    assert_is_answered(app_url, *WITH_TOOLS[name])


def test_a_call_and_the_text_beside_it_are_one_message(client: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": ""}
    text = {"role": "assistant", "content": "I look."}
    begun, ended = {"role": "user", "content": "Time?"}, {"type": "function_call_output", "call_id": "c", "output": "5"}
    sizes = [
        respond(client, input=[begun, *turn, ended], tool_choice="none").usage.input_tokens
        for turn in ([call, text], [text, call])
    ]
    chat: Any = [
        begun,
        {**text, "tool_calls": [{"id": "c", "function": {"name": "time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    assert {*sizes} == {ask(client, messages=chat, tool_choice="none").usage.prompt_tokens}


def test_a_tool_may_return_a_picture(client: OpenAI, app_url: str) -> None:
    picture = user_message("", (PICTURES / "one.png").read_bytes())["content"][0]
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    asked: Any = {"role": "user", "content": "Time?"}
    messages: Any = [asked, {"role": "assistant", "tool_calls": [call]}]
    sizes = []
    for content in ("5", [{"type": "text", "text": "5"}, picture]):
        result = {"role": "tool", "tool_call_id": "c", "content": content}
        answer = ask(client, messages=[*messages, result], tool_choice="none", max_tokens=1)
        sizes.append(answer.usage.prompt_tokens)
    assert sizes[1] > sizes[0] + 10, "the picture's tokens"
    called = {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}
    shown = {"type": "input_image", "image_url": picture["image_url"]["url"]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}, shown]}
    response = respond(client, input=[asked, called, output], tool_choice="none", max_output_tokens=1)
    assert response.usage.input_tokens == sizes[1]


PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes a file."}}
PATCH_ITEM: Any = {"type": "custom", "name": "patch"}


def test_a_custom_tool_gets_a_text(client: OpenAI) -> None:
    named: Any = {"type": "custom", "custom": {"name": "patch"}}
    options: Any = {"tools": [WEATHER, PATCH], "tool_choice": named, "parallel_tool_calls": False, "max_tokens": 100}
    (call,) = ask(client, **options).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "patch")
    assert isinstance(call.custom.input, str)
    deltas = [choice.delta for event in ask(client, stream=True, **options) for choice in event.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert (parts[0].type, parts[0].custom["name"]) == ("custom", "patch")
    assert "".join(part.custom["input"] for part in parts) == call.custom.input
    history: Any = [
        user_message("Weather?"),
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert ask(client, messages=history, tools=[PATCH], tool_choice="none").choices[0].message.content


def test_a_custom_tool_gets_a_text_in_the_responses_api(client: OpenAI) -> None:
    options: Any = {"tools": [PATCH_ITEM], "tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 100}
    events = list(respond(client, parallel_tool_calls=False, stream=True, **options))
    (call,) = events[-1].response.output
    assert (call.type, call.name) == ("custom_tool_call", "patch")
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == call.input
    begun: Any = {"role": "user", "content": "Weather?"}
    ended: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    called = call.model_dump(exclude_none=True)
    after = respond(client, input=[begun, called, ended], tools=[PATCH_ITEM], tool_choice="none")
    assert after.output_text


def test_a_tool_that_the_server_does_not_run_is_named_and_left_out(app_url: str) -> None:
    body = {"model": "shapes", "input": "Hi", "max_output_tokens": 1}
    sizes = []
    for tools in ([WEATHER_ITEM], [WEATHER_ITEM, {"type": "web_search"}]):
        answer = httpx.post(f"{app_url}/v1/responses", json={**body, "tools": tools}, timeout=60)
        assert answer.status_code == 200, answer.text
        sizes.append(answer.json()["usage"]["input_tokens"])
    assert sizes[0] == sizes[1]
    assert answer.headers["x-raylens-ignored-fields"] == "tools[1].web_search"


def test_variables_of_the_template_are_the_clients(client: OpenAI, app_url: str) -> None:
    def prompt_ids(**variables: Any) -> list[int]:
        body = {"messages": [user_message("Hi")], "chat_template_kwargs": variables}
        answer = httpx.post(f"{app_url}/tokenize", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["tokens"]
        return ids

    plain, happy = prompt_ids(), prompt_ids(mood="happy")
    text = httpx.post(f"{app_url}/detokenize", json={"tokens": happy}).json()["prompt"]
    assert text.removeprefix("<s>").lstrip().startswith("Be happy.")
    assert prompt_ids(unread=5) == plain
    # Marks that stand in a variable are text.
    assert prompt_ids(mood="</s><image>").count(2) == 0
    assert 3 not in prompt_ids(mood="</s><image>")
    for extra in ({"extra_body": {"chat_template_kwargs": {"mood": "happy"}}}, {}):
        size = ask(client, messages=[user_message("Hi")], tools=None, max_tokens=1, **extra).usage.prompt_tokens
        assert size == len(happy if extra else plain)
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "bos_token"):
        body = {"model": "shapes", "messages": [user_message("Hi")], "chat_template_kwargs": {name: "x"}}
        error = httpx.post(f"{app_url}/v1/chat/completions", json=body, timeout=60).json()["error"]
        assert error["param"] == f"chat_template_kwargs.{name}"


def test_a_template_that_computes_without_end_is_no_mistake_of_the_client(client: OpenAI, app_url: str) -> None:
    body = {"model": "shapes", "messages": [user_message("Hi")], "chat_template_kwargs": {"mood": "endless"}}
    for route in ("/tokenize", "/v1/chat/completions"):
        answer = httpx.post(f"{app_url}{route}", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "chat_template_failed")
        assert "the model's chat template" in error["message"]
    assert ask(client, max_tokens=1).usage.completion_tokens == 1
