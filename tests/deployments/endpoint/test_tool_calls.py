"""Calls of tools in a model's text, found while it streams."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import ValidationError

from raylens.deployments.api.tools import FunctionCall, FunctionDefinition, OfferedTools, Tool, ToolCall
from raylens.deployments.endpoint.tool_calls import ToolCallParser, forced_call
from raylens.preprocess.schema import ToolCallFormat

HERMES = ToolCallFormat("<tool_call>\n", "\n</tool_call>")
NAMES = {"weather", "time"}


def call(name: str = "weather", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parsed(*pieces: str) -> tuple[str, list[tuple[str, object]]]:
    parser, text, calls = ToolCallParser(HERMES, NAMES), "", list[ToolCall]()
    for piece in pieces:
        more_text, more_calls = parser.feed(piece)
        text += more_text
        calls += more_calls
    text += parser.flush()
    return text, [(one.function.name, json.loads(one.function.arguments)) for one in calls]


def test_text_and_calls_are_told_apart() -> None:
    assert parsed("Just text.") == ("Just text.", [])
    assert parsed(call(city="Rome")) == ("", [("weather", {"city": "Rome"})])
    both = f"Let me see.\n{call(city='Rome')}\n{call('time')}"
    assert parsed(call(city="</tool_call>")) == ("", [("weather", {"city": "</tool_call>"})])
    assert parsed(f"<tool_call>{call()}") == ("<tool_call>", [("weather", {})])
    assert parsed(both) == ("Let me see.", [("weather", {"city": "Rome"}), ("time", {})])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call>",
        call("unknown"),
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n["weather"]\n</tool_call>',
        '<tool_call>\n{"name": [], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud800"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"days": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"days": ' + "9" * 5000 + "}}\n</tool_call>",
        '<tool_call>\n{"name": "weather", "argum',
        "a <tool",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text(text: str) -> None:
    assert parsed(text) == (text, [])


def test_some_servers_write_no_text_for_no_arguments() -> None:
    assert FunctionCall(name="f", arguments=" ").arguments == "{}"


@pytest.mark.parametrize("arguments", ["x", "[]", '{"a": NaN}', r'{"a": "\ud800"}', '{"a": ' * 70 + "1" + "}" * 70])
def test_arguments_that_no_prompt_can_hold_are_refused(arguments: str) -> None:
    with pytest.raises(ValidationError):
        FunctionCall(name="weather", arguments=arguments)


TEXTS = st.lists(
    st.sampled_from(["Hello ", "<", "<tool", call(city="Rom<"), call("time"), call("x"), "\n", "é"]), max_size=6
)


@given(parts=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=200, deadline=None)
def test_calls_are_found_however_the_text_is_cut(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    assert parsed(*pieces) == parsed(text)


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed("a <")[0] == "a "
    assert parser.feed("b")[0] == "<b"


def tool(name: str, **properties: object) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters))


def test_a_forced_call_can_be_nothing_else() -> None:
    tools = [tool("weather", city={"type": "string"}), tool('t-i.m"e'.replace('"', "_"))]
    single, several = (forced_call(HERMES, OfferedTools(tools, tools, is_single)) for is_single in (True, False))
    assert single is not None
    assert several is not None
    for form in (single, several):
        assert form.grammar is not None
        is_error, messages = LLMatcher.validate_grammar_with_warnings(form.grammar)
        assert not is_error, messages
