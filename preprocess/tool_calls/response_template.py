"""Reads the format of tool calls out of a tokenizer's `response_template`, for models whose format no table has.

Such a template tells transformers how to parse an answer (`transformers.utils.chat_parsing`)."""

import re
from collections.abc import Mapping
from typing import Any

from raylens.preprocess.tool_calls.call_syntax import JsonCall
from raylens.preprocess.tool_calls.formats import ToolCallFormat

_NAME = "response_template"
_KEY = re.compile(r"\{(?:content\.)?(\w+)\}")


def declared_format(response_template: object) -> ToolCallFormat | None:
    """Returns the format if calls are JSON between two texts: one call, or a list of them. Else None: where patterns
    read a call, they do not tell what a model writes."""
    match response_template:
        case {"fields": {"tool_calls": {"open": str(start), "close": str(end), "content": "json", **others}}}:
            if (syntax := _syntax(others)) is None or not start.strip() or not end.strip():
                return None
            if others.get("transform_each"):
                return ToolCallFormat(_NAME, syntax, begin=f"{start}[", finish=f"]{end}", separator=", ")
            return ToolCallFormat(_NAME, syntax, start, end)
    return None


def _syntax(field: Mapping[Any, Any]) -> JsonCall | None:
    match field:
        case {"content_args": _}:
            return None  # another dialect of JSON
        case {"transform": {"function": "{content}"}}:
            return JsonCall()
        case {"transform": {"function": {"name": str(name), "arguments": str(arguments)}}}:
            keys = [key[1] for key in map(_KEY.fullmatch, (arguments, name)) if key]
            return JsonCall(*keys) if len(keys) == 2 else None
    return None
