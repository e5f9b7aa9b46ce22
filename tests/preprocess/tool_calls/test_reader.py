"""Calls of tools in a model's text, found while it streams."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.preprocess.tool_calls.formats import FORMATS
from raylens.preprocess.tool_calls.reader import CallPart, ToolCallReader

TAGGED = "<tool_call><function=weather><parameter="
HALF = r'{"a": "\ud83d"}'
"""Half of a character in UTF-16."""
BY_NAME = {form.name: form for form in FORMATS}
OFFERED = {name: {"type": "object", "properties": {"city": {"type": "string"}}} for name in ("weather", "time")}


def call(name: str = "weather", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parts(*pieces: str, form: str = "hermes") -> tuple[str, list[CallPart]]:
    reader, text, found = ToolCallReader(BY_NAME[form], OFFERED), "", list[CallPart]()
    for piece in [*pieces, ""]:
        more_text, more = reader.feed(piece, is_last=piece == "")
        text += more_text
        found += more
    return text, found


def parsed(*pieces: str, form: str = "hermes") -> tuple[str, list[tuple[str, str]]]:
    """The text, and each call's function and arguments, as they are written."""
    text, found = parts(*pieces, form=form)
    calls: dict[int, tuple[str, str]] = {}
    for part in found:
        name, arguments = calls.get(part.index, (part.name or "", ""))
        calls[part.index] = name, arguments + part.arguments
    return text, [*calls.values()]


def test_text_and_calls_are_told_apart() -> None:
    assert parsed("Just text.") == ("Just text.", [])
    assert parsed(call(city="Rome")) == ("", [("weather", '{"city": "Rome"}')])
    both = f"Let me see.\n{call(city='Rome')}\n{call('time')}"
    assert parsed(call(city="</tool_call>")) == ("", [("weather", '{"city": "</tool_call>"}')])
    assert parsed(f"<tool_call>{call()}") == ("<tool_call>", [("weather", "{}")])
    assert parsed(both) == ("Let me see.", [("weather", '{"city": "Rome"}'), ("time", "{}")])
    assert parsed(f"{call()}\n\nDone.\n") == ("Done.\n", [("weather", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call>",
        call("unknown"),
        '<tool_call>\n{"name": "weather", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n["weather"]\n</tool_call>',
        '<tool_call>\n{"name": [], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "argum',
        "a <tool",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text(text: str) -> None:
    assert parsed(text) == (text, [])


TEXTS = st.lists(
    st.sampled_from(["Hello ", "<", "<tool", call(city="Rom<"), call("time"), call("x"), "\n", "é"]), max_size=6
)


@given(written=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=200, deadline=None)
def test_calls_are_found_however_the_text_is_cut(written: list[str], cuts: list[int]) -> None:
    text = "".join(written)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    assert parsed(*pieces) == parsed(text)


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader(BY_NAME["hermes"], OFFERED)
    assert reader.feed("a <")[0] == "a "
    assert reader.feed("b")[0] == "<b"


def test_arguments_are_told_while_they_are_written() -> None:
    reader = ToolCallReader(BY_NAME["hermes"], OFFERED)
    told = [reader.feed(text)[1] for text in ("<tool_call>\n", '{"name": "weather", ', '"arguments": {"ci', 'ty": "Ro')]
    assert [len(found) for found in told] == [0, 0, 1, 1]
    (begun,), (further,) = told[2:]
    assert (begun.index, begun.name, begun.arguments) == (0, "weather", '{"ci')
    assert begun.id is not None
    assert further == CallPart(0, 'ty": "Ro')


def test_a_string_between_tags_is_told_while_it_is_written() -> None:
    reader = ToolCallReader(BY_NAME["qwen3_coder"], OFFERED)
    pieces = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
        "me\n",
        "</para",
        "meter>\n</function>\n</tool_call>",
    )
    told = ["".join(part.arguments for part in reader.feed(piece)[1]) for piece in pieces]
    assert told == ['{"city": "Ro', "me", "", '"}']


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}', '{"city": "Rome"}'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}', '{"city": "Rome"}'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', '{"city": "Ro'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": }</tool_call>', '{"city": }'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": 1}"}\n</tool_call>', '{"city": 1}'),
        ("hermes", '<tool_call>\n{"arguments": {"city": 1}, "name": "weather"}\n</tool_call>', '{"city": 1}'),
        ("hermes", '<tool_call>\n{"name": "weather"}\n</tool_call>', "{}"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>Rome</parameter>", '{"city": "Rome"}'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>Rome</par", '{"city": "Rome</par"}'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n</function>\n</tool_call>", "{}"),
        ("qwen3_coder", f"{TAGGED}city>Rome</parameter><parameter=days>1", '{"city": "Rome"}'),
        ("qwen3_coder", f"{TAGGED}n>NaN</parameter></function></tool_call>", '{"n": "NaN"}'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Rome', '{"city": "Rome"'),
        ("gemma4", "<|tool_call>call:weather{n:1e999}<tool_call|>", '{"n": "1e999"}'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": null}\n</tool_call>', "{}"),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}</tool_call>',
            '{"a": "\\ud83d"}',
        ),
        ("llama4_pythonic", r'[weather(city="\ud83d\ude00")]', '{"city": "😀"}'),
        ("llama4_pythonic", r"[weather(city='\ud83d')]", '{"city": "\\ud83d"}'),
        ("llama4_pythonic", "[weather(city='Rome',", '{"city": "Rome"}'),
    ],
)
def test_a_call_that_does_not_end_is_a_call(form: str, text: str, arguments: str) -> None:
    assert parsed(text, form=form) == ("", [("weather", arguments)])


@pytest.mark.parametrize("form", ["gemma4", "hermes", "llama4_pythonic"])
def test_brackets_without_end_are_a_call_that_does_not_end(form: str) -> None:
    begun = {
        "gemma4": "<|tool_call>call:weather{city:",
        "hermes": '<tool_call>{"name": "weather", "arguments": {"city": ',
        "llama4_pythonic": "[weather(city=",
    }
    _, ((name, arguments),) = parsed(begun[form] + "[" * 20_000, form=form)
    assert (name, arguments[:1]) == ("weather", "{")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "snow", "parameters": {}}'),
        ("llama3_json", 'It is {"name": "weather", "parameters": {}}'),
        ("llama4_pythonic", "[1] says: [weather()]"),
        ("llama4_pythonic", "[weather]"),
        ("mistral", "[TOOL_CALLS]snow[ARGS]{}"),
        ("qwen3_coder", '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'),
    ],
)
def test_what_resembles_a_call_of_another_format_is_text(form: str, text: str) -> None:
    assert parsed(text, form=form) == (text, [])


@pytest.mark.parametrize(("form", "pattern"), [("mistral", r"[a-zA-Z0-9]{9}"), ("kimi_k2", "functions.weather:0")])
def test_ids_are_those_that_a_models_template_takes(form: str, pattern: str) -> None:
    texts = {
        "mistral": "[TOOL_CALLS]weather[ARGS]{}",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}",
    }
    _, (part,) = parts(texts[form], form=form)
    assert part.id is not None
    assert re.fullmatch(pattern, part.id)


def test_arguments_that_come_twice_are_one_call() -> None:
    twice = '<tool_call>{"name": "weather", "arguments": {"a": 1}, "parameters": {"b": 2}, "name": "time"}</tool_call>'
    assert parsed(twice + call("time")) == ("", [("weather", '{"a": 1}'), ("time", "{}")])
    assert parsed(*(twice + call("time"))) == ("", [("weather", '{"a": 1}'), ("time", "{}")])


def test_newlines_around_a_mark_that_is_no_call_are_kept() -> None:
    text = "Write it so:\n\n<tool_call>\n{...}\n</tool_call>\n\nDone."
    assert parsed(text) == (text, [])
    assert parsed(f"{call()}\nSo:\n\n<tool_call>\n\nfoo") == ("So:\n\n<tool_call>\n\nfoo", [("weather", "{}")])


def test_text_behind_a_call_in_another_form_is_kept() -> None:
    text, calls = parsed('[weather("Rome")] And x = 5.', form="llama4_pythonic")
    assert (text, calls) == ('"Rome")] And x = 5.', [("weather", "{}")])
