"""Each format of tool calls: a template's is found by what it writes, calls are read as they were written, however the
text is cut, and the grammar of forced calls takes them."""

import itertools
import json
import re
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.grammar_check import make_matcher
from raylens.llm.sampling.structured_output import MAX_GRAMMAR_CHARS
from raylens.preprocess.schema import InvalidRequestError, Message
from raylens.preprocess.tool_calls.detection import detect_format
from raylens.preprocess.tool_calls.formats import FORMATS, ToolCallFormat
from raylens.preprocess.tool_calls.reader import ToolCallReader
from tests.preprocess.tool_calls.call_templates import TEMPLATES

BY_NAME = {form.name: form for form in FORMATS}
WITH_ID = re.compile(r'("tool_call_id": "0", )|(, "id": "[^"]*")')
"""What the server adds, and a model need not write."""

Call = tuple[str, dict[str, Any]]


class NoSpecialTokens:
    added_tokens_decoder: dict[int, Any] = {}


@cache
def compiled(template: str) -> jinja2.Template:
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return made.from_string(template)


def rendered(name: str, messages: list[Message]) -> str:
    try:
        return compiled(TEMPLATES[name]).render(messages=messages)
    except TypeError:
        return ""


def written(name: str, calls: list[Call]) -> str:
    """The calls as the format's template writes them."""
    takes_text = name == "deepseek_v3"
    messages = [
        {
            "id": f"call{number:05}",
            "function": {
                "name": function,
                "arguments": json.dumps(arguments, ensure_ascii=False) if takes_text else arguments,
            },
        }
        for number, (function, arguments) in enumerate(calls)
    ]
    text = rendered(name, [{"role": "assistant", "tool_calls": messages}])
    return text.removeprefix("[assistant]").removesuffix("</s>")


def schema_of(value: object) -> dict[str, Any]:
    """A schema that says no more than the types."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {key: schema_of(inner) for key, inner in value.items()},
            "required": [*value],
        }
    if isinstance(value, list):
        return {"type": "array"}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": kinds.get(type(value), "null")}


def read(form: ToolCallFormat, pieces: list[str], offered: dict[str, Any]) -> tuple[str, list[Call]]:
    reader, text = ToolCallReader(form, offered), ""
    names, arguments = list[str](), list[str]()
    for number, piece in enumerate(pieces):
        more, parts = reader.feed(piece, is_last=number == len(pieces) - 1)
        text += more
        for part in parts:
            if part.name is not None:
                assert part.index == len(names)
                names.append(part.name)
                arguments.append("")
            arguments[part.index] += part.arguments
    return text, [(name, json.loads(one)) for name, one in zip(names, arguments, strict=True)]


WORDS = st.text(alphabet="abc_XYZ09", min_size=1, max_size=6).map(lambda text: f"f{text}")
QUOTE = '<|"|>'
"""No text within such quotes can hold one."""
ANY_TEXTS = st.text(alphabet="ab \n\t\"'{}[],:=()<>/\\é本😀|`", max_size=12).filter(lambda text: QUOTE not in text)
TEXTS = ANY_TEXTS | st.sampled_from(["</tool", "null", "7", "True"])
ATOMS = (
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(st.tuples(WORDS, st.dictionaries(WORDS, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 300), max_size=12), before=st.sampled_from(["", "I look.", "a < [b"]))
@settings(max_examples=40, deadline=None)
def test_calls_are_read_as_they_were_written(name: str, calls: list[Call], cuts: list[int], before: str) -> None:
    form = BY_NAME[name]
    before = "" if form.is_alone else before
    calls = [*dict(calls).items()]  # with one schema for each name
    offered = {function: schema_of(arguments) for function, arguments in calls}
    text = before + written(name, calls)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    told, found = read(form, [text[start:end] for start, end in itertools.pairwise(ends)], offered)
    assert (told, found) == (before, calls)
    assert before + written(name, found) == text


def test_every_format_has_a_template() -> None:
    assert [*TEMPLATES] == [form.name for form in FORMATS]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_templates_format_is_found(name: str) -> None:
    form, takes_text = detect_format(lambda messages: rendered(name, messages), NoSpecialTokens())
    assert form is not None
    assert (form.name, takes_text) == (name, name == "deepseek_v3")


@pytest.mark.parametrize("template", ["", "{{ messages }}", "{{ messages[-1].content }}", "{{ 1 + '' }}"])
def test_no_format_is_found_where_there_is_none(template: str) -> None:
    def render(messages: list[Message]) -> str:
        try:
            return compiled(template).render(messages=messages)
        except TypeError:
            return ""

    assert detect_format(render, NoSpecialTokens()) == (None, False)


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> ByteTokenizer:
    own = AutoTokenizer.from_pretrained(shapes)
    return ByteTokenizer(own, len(own), frozenset({own.eos_token_id}))


@pytest.fixture(scope="module")
def with_marks(shapes: str) -> ByteTokenizer:
    """Each mark in angle brackets is a token, as `<tool_call>` is one of Qwen's, but no special one."""
    own = AutoTokenizer.from_pretrained(shapes)
    marks = {mark for form in FORMATS for mark in re.findall(r"<[^<>\s]+>", form.marks)}
    own.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in sorted(marks)])
    return ByteTokenizer(own, len(own), frozenset({own.eos_token_id}))


PLACES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"enum": ["rain", "sun"]},
        "near": {"type": "array", "items": {"type": "string"}},
        "round": {"type": "number"},
    },
    "required": ["city", "kind"],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"city": 'San José "x"', "kind": "sun"}, True),
        ({"city": "Rome", "days": 3, "kind": "rain", "near": ["a", "b"], "round": 0.5}, True),
        ({"city": "Rome"}, False),
        ({"city": "Rome", "kind": "snow"}, False),
        ({"city": "Rome", "days": "three", "kind": "rain"}, False),
    ],
)
def test_the_grammar_of_forced_calls_takes_what_a_template_writes(
    tokenizer: ByteTokenizer, name: str, arguments: dict[str, Any], is_right: bool
) -> None:
    check_grammar(tokenizer, BY_NAME[name], arguments, is_right)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_where_marks_are_tokens(with_marks: ByteTokenizer, name: str) -> None:
    form, _ = detect_format(lambda messages: rendered(name, messages), with_marks._tokenizer)
    assert form is not None
    assert form.special_tokens or "<" not in form.marks
    assert not form.has_hidden_marks
    check_grammar(with_marks, form, {"city": "Rome", "days": 3, "kind": "rain"}, True)
    check_grammar(with_marks, form, {"city": "Rome", "kind": "snow"}, False)


def check_grammar(tokenizer: ByteTokenizer, form: ToolCallFormat, arguments: dict[str, Any], is_right: bool) -> None:
    functions = {"weather": PLACES, "time": {"type": "object", "properties": {}}}
    grammar = form.grammar(functions, is_single=True, max_chars=MAX_GRAMMAR_CHARS)
    matcher = make_matcher(tokenizer.matching(), "grammar", grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer._ids(WITH_ID.sub("", written(form.name, [("weather", arguments)])))
    num_taken = matcher.try_consume_tokens([*ids])
    assert (num_taken == len(ids) and matcher.is_accepting()) == is_right, tokenizer._tokenizer.decode(ids[:num_taken])


def takes(tokenizer: ByteTokenizer, name: str, schema: dict[str, Any], text: str) -> bool:
    """Whether the text is a forced call of `f`."""
    grammar = BY_NAME[name].grammar({"f": schema}, is_single=True, max_chars=MAX_GRAMMAR_CHARS)
    matcher = make_matcher(tokenizer.matching(), "grammar", grammar)
    ids = tokenizer._ids(text)
    return matcher.try_consume_tokens([*ids]) == len(ids) and bool(matcher.is_accepting())


def test_what_may_be_a_string_is_one_between_tags(tokenizer: ByteTokenizer) -> None:
    schema = {"properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["city"]}
    text = written("qwen3_coder", [("f", {"city": "Rome"})])
    assert takes(tokenizer, "qwen3_coder", schema, text)
    assert read(BY_NAME["qwen3_coder"], [text], {"f": schema}) == ("", [("f", {"city": "Rome"})])
    union = {"properties": {"city": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}}}
    text = written("qwen3_coder", [("f", {"city": {"a": 1}})])
    assert read(BY_NAME["qwen3_coder"], [text], {"f": union}) == ("", [("f", {"city": {"a": 1}})])


@pytest.mark.parametrize("name", ["hermes", "kimi_k2"])
def test_forced_arguments_are_an_object(tokenizer: ByteTokenizer, name: str) -> None:
    text = written(name, [("f", {"a": 5})])
    schema = {"properties": {"a": {"type": "integer"}}}
    assert takes(tokenizer, name, schema, text)
    assert not takes(tokenizer, name, schema, text.replace('{"a": 5}', "5"))


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "gemma3"])
def test_schemas_of_any_form_make_a_grammar(tokenizer: ByteTokenizer, name: str) -> None:
    referring = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
    assert takes(tokenizer, name, referring, written(name, [("f", {"a": 5})]))
    assert not takes(tokenizer, name, referring, written(name, [("f", {})]))
    odd: dict[str, Any] = {"properties": {"a": {"type": "integer"}, "b": True}, "required": [["a"], "a"]}
    assert takes(tokenizer, name, odd, written(name, [("f", {"a": 5})]))
    assert read(BY_NAME[name], [written(name, [("f", {"a": 5})])], {"f": odd}) == ("", [("f", {"a": 5})])


def test_a_long_grammar_is_refused_before_it_is_written() -> None:
    definitions = {"X": {"description": "x" * 10_000}}
    plain = {"$defs": definitions, "properties": {f"a{number}": {"type": "integer"} for number in range(300)}}
    grammar = BY_NAME["glm45"].grammar({"f": plain}, is_single=True, max_chars=MAX_GRAMMAR_CHARS)
    assert "xxx" not in grammar, "nothing refers to them"
    lists = {f"a{number}": {"type": "array", "items": {"$ref": "#/$defs/X"}} for number in range(300)}
    referring = {**plain, "properties": lists}
    with pytest.raises(InvalidRequestError, match="at most 131072 characters"):
        BY_NAME["glm45"].grammar({"f": referring}, is_single=True, max_chars=MAX_GRAMMAR_CHARS)
