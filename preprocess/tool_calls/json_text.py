"""Reads JSON from the text of an answer while it comes."""

import json
from collections.abc import Generator
from typing import TypeVar

from raylens.preprocess.tool_calls.incoming_text import IncomingText, NotInFormatError, Waiting

ReturnT = TypeVar("ReturnT")
Telling = Generator[str | None, None, ReturnT]
"""Yields parts of a JSON text as they become certain, and None where it needs more text."""


def escaped(text: str) -> str:
    """Returns the text as it stands within quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of(value: object) -> str:
    """Returns the value as JSON that can be encoded. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a character that needs two in UTF-16, as models write in escapes.
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def read_container(source: IncomingText) -> Telling[None]:
    """Tells an object or a list as it stands in the text. Raises NotInFormatError where brackets do not match, or at
    the first character that JSON has only within quotes."""
    expected, is_quoted, is_escaped = list[str](), False, False
    if (yield from source.next_char()) not in "{[":
        raise NotInFormatError("an object or a list")
    while True:
        text = yield from source.some()
        for index, char in enumerate(text):
            if is_quoted:
                is_quoted, is_escaped = is_escaped or char != '"', char == "\\" and not is_escaped
            elif char == '"':
                is_quoted = True
            elif char in "{[":
                expected.append("}" if char == "{" else "]")
            elif char in "<>`|" or (char in "}]" and expected.pop() != char):
                yield source.take(index)
                raise NotInFormatError(char)
            if not expected:
                yield source.take(index + 1)
                return
        yield source.take(len(text))


def read_value(source: IncomingText) -> Waiting[str]:
    """Returns the text of a JSON value. Raises NotInFormatError if it is none."""
    first = yield from source.next_char()
    if first in "{[":
        text = yield from whole(read_container(source))
    elif first == '"':
        text = yield from _quoted(source)
    else:
        text = yield from source.while_char(lambda char: char not in ",]}" and not char.isspace())
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotInFormatError("a JSON value") from error
    return text


def read_string(source: IncomingText) -> Waiting[str]:
    """Returns a JSON string's value."""
    value = json.loads((yield from read_value(source)))
    if not isinstance(value, str):
        raise NotInFormatError("a string")
    return value


def _quoted(source: IncomingText) -> Waiting[str]:
    begun = source.at
    source.at += 1
    while True:
        yield from source.while_char(lambda char: char not in '"\\')
        if source.take(1) == '"':
            return source.text[begun : source.at]
        yield from source.some()
        source.at += 1


def whole(telling: Telling[None]) -> Waiting[str]:
    """Returns what is told, all at once."""
    parts = []
    for part in telling:
        if part is None:
            yield
        else:
            parts.append(part)
    return "".join(parts)
