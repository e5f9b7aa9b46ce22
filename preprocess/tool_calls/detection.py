"""Finds a model's format of tool calls by what its chat template writes for a call in the history: one that the table
has, or else one that the tokenizer declares."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raylens.preprocess.schema import Message
from raylens.preprocess.tool_calls.formats import FORMATS, ToolCallFormat
from raylens.preprocess.tool_calls.reader import ToolCallReader
from raylens.preprocess.tool_calls.response_template import declared_format

Render = Callable[[list[Message]], str]
"""Fills the template. Returns an empty text if the template rejects the messages."""

_NAME, _ARGUMENTS = "zqname", {"zqcount": 7, "zqtext": "zq text"}
_TYPES = {"zqcount": {"type": "integer"}, "zqtext": {"type": "string"}}
_ASKED = "zquser"
_CALL_ID = "zqcall123"  # Mistral's templates require nine letters and digits


def detect_format(render: Render, hf_tokenizer: Any, name: str | None = None) -> tuple[ToolCallFormat | None, bool]:
    """Returns the format, and whether the template takes arguments as text. The format is None without a known one.
    `name`: of the format, whatever the template writes."""
    candidates = [form for form in FORMATS if name in (None, form.name)]
    declared = declared_format(getattr(hf_tokenizer, "response_template", None))
    if name is None and declared is not None:
        candidates = sorted([*candidates, declared], key=lambda form: form.is_alone)  # those without marks are last
    for takes_text in (False, True):
        written = render(_conversation(json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS))
        answer = written[written.find(_ASKED) + len(_ASKED) :]
        for form in candidates if _NAME in answer else ():
            if name is not None or _is_written(answer, form):
                return _with_special_tokens(form, hf_tokenizer), takes_text
    return (None if name is None else _with_special_tokens(candidates[0], hf_tokenizer)), False


def _conversation(arguments: object) -> list[Message]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "zqresult"},
    ]


def _is_written(answer: str, form: ToolCallFormat) -> bool:
    if not all(word in answer for word in f"{form.begin} {form.start} {form.end} {form.finish}".split()):
        return False
    if form.is_alone:
        answer = answer[answer.rfind(form.begin or "{", 0, answer.find(_NAME)) :]
    reader = ToolCallReader(form, {_NAME: {"type": "object", "properties": _TYPES}})
    _, parts = reader.feed(answer, is_last=True)
    try:
        return bool(parts) and json.loads(parts[0].arguments) == _ARGUMENTS
    except ValueError:
        return False


def _with_special_tokens(form: ToolCallFormat, hf_tokenizer: Any) -> ToolCallFormat:
    """llguidance takes an added token in angle brackets for a special one, such as `<tool_call>` of Qwen's."""
    marks, special_tokens, has_hidden_marks = form.marks, dict[str, int](), False
    for token_id, token in hf_tokenizer.added_tokens_decoder.items():
        if token.content in marks and (token.special or re.fullmatch("<.*>", token.content)):
            special_tokens[token.content] = token_id
            has_hidden_marks = has_hidden_marks or token.special
    return replace(form, special_tokens=special_tokens, has_hidden_marks=has_hidden_marks)
