"""Calls in a format that only the tokenizer's `response_template` declares are read as transformers parses them."""

import copy
import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.grammar_check import make_matcher
from raylens.llm.sampling.structured_output import MAX_GRAMMAR_CHARS
from raylens.preprocess.schema import Message
from raylens.preprocess.tool_calls.detection import detect_format
from raylens.preprocess.tool_calls.response_template import declared_format
from tests.preprocess.tool_calls.test_formats import compiled, read

EACH = {
    "open": "((",
    "close": "))",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}},
}
LIST = {**EACH, "transform": {"function": {"name": "{tool}", "arguments": "{input}"}}, "transform_each": True}
WHOLE = {**EACH, "transform": {"type": "function", "function": "{content}"}}
KEYS = {"each": ("tool", "input"), "list": ("tool", "input"), "whole": ("name", "arguments")}
FIELDS = {"each": EACH, "list": {**LIST, "repeats": False}, "whole": WHOLE}


def chat_template(kind: str) -> str:
    """Writes calls alone, each in brackets, or all in one list."""
    name, arguments = KEYS[kind]
    function = f"{{'{name}': call.function.name, '{arguments}': call.function.arguments}}"
    comma = "{{ ', ' if not loop.last }}"
    calls = (
        f"(([{{% for call in m.tool_calls %}}{{{{ {function} | tojson }}}}{comma}{{% endfor %}}]))"
        if kind == "list"
        else f"{{% for call in m.tool_calls %}}(({{{{ {function} | tojson }}}})){{% endfor %}}"
    )
    said = "[{{ m.role }}]{{ m.content or '' }}"
    return f"{{% for m in messages %}}{said}{{% if m.tool_calls %}}{calls}{{% endif %}}{{% endfor %}}"


@pytest.fixture(scope="module", params=FIELDS)
def declared(request: pytest.FixtureRequest, shapes: str) -> tuple[str, Any]:
    """The text of two calls, and the tokenizer."""
    tokenizer = copy.copy(AutoTokenizer.from_pretrained(shapes))
    fields = {"tool_calls": FIELDS[request.param], "content": {}}
    tokenizer.response_template = {"start_anchor": "[assistant]", "fields": fields}
    calls = [
        {"function": {"name": "f", "arguments": {"a": 1, "b": ["x"]}}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    template = compiled(chat_template(request.param))
    tokenizer.chat_template = chat_template(request.param)
    return template.render(messages=[{"role": "assistant", "content": "Hm.", "tool_calls": calls}]), tokenizer


def test_a_declared_format_reads_what_transformers_parses(declared: tuple[str, Any]) -> None:
    text, tokenizer = declared

    def render(messages: list[Message]) -> str:
        return compiled(tokenizer.chat_template).render(messages=messages)

    form, takes_text = detect_format(render, tokenizer)
    assert form is not None
    assert (form.name, takes_text) == ("response_template", False)
    answer = text.removeprefix("[assistant]")
    theirs = tokenizer.parse_response(answer, prefix="[assistant]")
    told, calls = read(form, [*answer], {"f": {}, "g": {}})
    assert told == theirs["content"] == "Hm."
    parsed = [call["function"] for call in theirs["tool_calls"]]
    assert calls == [(call["name"], call["arguments"]) for call in parsed] == [("f", {"a": 1, "b": ["x"]}), ("g", {})]
    matching = ByteTokenizer(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    grammar = form.grammar({"f": {}, "g": {}}, is_single=False, max_chars=MAX_GRAMMAR_CHARS)
    matcher = make_matcher(matching.matching(), "grammar", grammar)
    ids = matching._ids(answer.removeprefix("Hm."))
    assert (matcher.try_consume_tokens([*ids]), matcher.is_accepting()) == (len(ids), True)


@pytest.mark.parametrize(
    "field",
    [
        {**EACH, "content": "xml-inline"},
        {**EACH, "open": "\n"},
        {**LIST, "close": " "},
        {**EACH, "content_args": {"unquoted_keys": True}},
        {**EACH, "transform": {"function": {"name": "fixed", "arguments": "{content}"}}},
        {**EACH, "transform": {"function": {"name": "{content.a.b}", "arguments": "{content.c}"}}},
        {"open_pattern": "[(]+", **{key: EACH[key] for key in ("close", "content", "transform")}},
    ],
    ids=json.dumps,
)
def test_others_are_not_guessed(field: dict[str, Any]) -> None:
    assert declared_format({"fields": {"tool_calls": field}}) is None
    assert declared_format(None) is None
