"""The arguments of calls that clients send."""

from typing import Any

import pytest
from pydantic import ValidationError

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.api.responses import ResponsesRequest
from raylens.deployments.api.tools import FunctionCall, OfferedTools


def test_some_servers_write_no_text_for_no_arguments() -> None:
    assert FunctionCall(name="f", arguments=" ").arguments == "{}"


@pytest.mark.parametrize("arguments", ["x", "[]", '{"a": NaN}', r'{"a": "\ud800"}', '{"a": ' * 70 + "1" + "}" * 70])
def test_arguments_that_no_prompt_can_hold_are_refused(arguments: str) -> None:
    with pytest.raises(ValidationError):
        FunctionCall(name="weather", arguments=arguments)


FUNCTIONS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
CUSTOM: Any = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Edit.", "format": {"type": "grammar", "definition": "start: /x/"}},
}
NOTHING = {"mode": "required", "tools": []}
HOSTED: Any = {"type": "web_search", "filters": {"allowed_domains": []}}


def items(tools: list[Any]) -> list[Any]:
    """The same tools in the Responses API."""
    return [{"type": tool["type"], **tool.get(tool["type"], {"filters": {}})} for tool in tools]


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})


def response(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "Hi", **fields})


def both(choice: Any, item_choice: Any, tools: list[Any]) -> OfferedTools:
    """What both APIs offer, which is the same."""
    offered = chat(tools=tools, tool_choice=choice).offered
    assert response(tools=items(tools), tool_choice=item_choice).offered == offered
    return offered


def names(tools: list[Any]) -> list[str]:
    return [tool.function.name for tool in tools]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_an_answer_may_call_the_allowed_tools_only(mode: str) -> None:
    tools = [FUNCTIONS[1], {"type": "mcp", "server_label": "x"}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    item_choice = {"type": "allowed_tools", "mode": mode, "tools": items(tools)}
    offered = both(choice, item_choice, FUNCTIONS)
    assert (names(offered.tools), names(offered.allowed)) == (["weather", "time"], ["time"])
    assert offered.is_forced == (mode == "required")


def test_a_custom_tool_is_a_function_of_a_text() -> None:
    named = {"type": "custom", "custom": {"name": "patch"}}
    offered = both(named, {"type": "custom", "name": "patch"}, [*FUNCTIONS, CUSTOM])
    assert (names(offered.allowed), offered.custom, offered.is_forced) == (["patch"], frozenset({"patch"}), True)
    function = offered.allowed[0].template_form()["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"] == "Edit.\nThe input follows this grammar:\nstart: /x/"


def test_tools_that_other_servers_run_are_left_out_and_named() -> None:
    body = chat(tools=[*FUNCTIONS, HOSTED])
    assert names(body.offered.tools) == ["weather", "time"]
    assert body.unknown_fields == ["tools[2].web_search"]
    answer = response(tools=[HOSTED])
    assert (answer.offered.tools, answer.unknown_fields) == ([], ["tools[0].web_search"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [HOSTED], "tool_choice": "required"}, "tool_choice: there are no tools to choose from"),
        ({"tools": [HOSTED], "tool_choice": {"type": "web_search"}}, "this server runs no tool of type 'web_search'"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "allowed_tools": NOTHING}},
            "tool_choice: there are no tools to choose from",
        ),
        ({"tools": [*FUNCTIONS, FUNCTIONS[0]]}, "tools: two functions have the same name"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names a function that is not among the tools",
        ),
        ({"tools": [{"name": "x"}]}, "tools.0.Hosted.type"),
        ({"tools": FUNCTIONS, "tool_choice": "sometimes"}, "'none', 'auto' or 'required'"),
    ],
)
def test_a_choice_that_cannot_be_obeyed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chat(**fields)
