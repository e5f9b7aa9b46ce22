"""The syntaxes of one tool call: each reads a call while it comes, and writes the grammar of one."""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from raylens.preprocess.tool_calls.call_grammar import CallGrammar, Schema, alternatives
from raylens.preprocess.tool_calls.incoming_text import EndOfTextError, IncomingText, NotInFormatError, Waiting
from raylens.preprocess.tool_calls.json_text import (
    Telling,
    escaped,
    json_of,
    read_container,
    read_string,
    read_value,
    whole,
)
from raylens.preprocess.tool_calls.parameters import from_text, parameters_of, string_options, types_of

Offered = Mapping[str, Schema]
"""The schema of the arguments by the function's name."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins: its function is offered."""

    name: str


CallReading = Generator[Called | str | None, None, None]
"""Yields the function, then its arguments' JSON in parts, and None where it needs more text."""


@dataclass(frozen=True, slots=True)
class CallSyntax(ABC):
    @abstractmethod
    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        """Raises NotInFormatError. Before the function is told, it is no call."""

    @abstractmethod
    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        """Returns what a call of the function is. `schema`: of its arguments."""


def _called(name: str, offered: Offered) -> Called:
    if name not in offered:
        raise NotInFormatError(f"{name[:100]!r} is not offered")
    return Called(name)


@dataclass(frozen=True, slots=True)
class JsonCall(CallSyntax):
    """`{"name": "f", "arguments": {…}}`, in any order. `name`: its key. `arguments`: the key that a grammar demands;
    answers may have either."""

    arguments: str = "arguments"
    name: str = "name"

    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        yield from source.expect("{")
        called: Called | None = None
        early, is_told = "{}", False
        while True:
            key = yield from read_string(source)
            yield from source.expect(":")
            if key == self.name and called is None:
                called = _called((yield from read_string(source)), offered)
            elif key not in (self.arguments, "arguments", "parameters") or is_told:
                yield from read_value(source)
            elif called is not None:
                is_told = True
                yield from _begun(called, _read_arguments(source))
            else:
                early = yield from whole(_read_arguments(source))
            if not (yield from source.finds(",")):
                break
        yield from source.expect("}")
        if called is None:
            raise NotInFormatError("a name")
        if not is_told:
            yield called
            yield early

    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        opening = grammar.literal(f'{{"{self.name}": {json.dumps(name)}, "{self.arguments}": ')
        return f'{opening} {grammar.json({**schema, "type": "object"})} "}}"'


@dataclass(frozen=True, slots=True)
class NamedJsonCall(CallSyntax):
    """The name, `name_end`, and the arguments as JSON. `around_name`: what is written for a name, `{}`. `name_pattern`:
    what may be read there; its group is the name."""

    name_end: str
    around_name: str = "{}"
    name_pattern: str = "(.+)"

    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        written = re.fullmatch(self.name_pattern, (yield from source.until(self.name_end.strip())).strip())
        if written is None:
            raise NotInFormatError("a name")
        yield from _begun(_called(written[1], offered), _read_arguments(source))

    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        opening = grammar.literal(self.around_name.format(name) + self.name_end)
        return f"{opening} {grammar.json({**schema, 'type': 'object'})}"


@dataclass(frozen=True, slots=True)
class TaggedCall(CallSyntax):
    """The name, `name_end`, and each argument as `key_start`, key, `key_end`, value, `value_end`. Strings are written
    without quotes, all else as JSON."""

    name_end: str
    key_start: str
    key_end: str
    value_end: str

    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        name = yield from _read_name(source)
        yield from source.expect(self.name_end)
        yield _called(name, offered)
        parameters = parameters_of(offered[name])
        opening = "{"
        try:
            while (yield from source.finds(self.key_start)):
                key = yield from self._read_key(source)
                schema, _ = parameters.get(key, ({}, False))
                for part in self._read_value(source, schema, f"{opening}{json_of(key)}: "):
                    opening = opening if part is None else ", "
                    yield part
        except NotInFormatError:
            yield _closed(opening)
            raise
        yield _closed(opening)

    def _read_key(self, source: IncomingText) -> Waiting[str]:
        first, *others = self.key_end.split()
        key = yield from source.until(first)
        yield from source.expect(" ".join(others))
        return key.strip()

    def _read_value(self, source: IncomingText, schema: Schema, before: str) -> Telling[None]:
        """Tells `before` and the value. Only a string is told while it is written."""
        if self.key_end.endswith("\n") and (yield from source.some()).startswith("\n"):
            source.take(1)
        if types_of(schema) == {"string"}:
            yield f'{before}"'
            yield from _read_text(source, self.value_end.rstrip())
            yield '"'
        else:
            text = yield from whole(_read_text(source, self.value_end.rstrip()))
            yield before + from_text(json.loads(f'"{text}"'), schema)

    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        parameters = parameters_of(schema)
        arguments = [(self._argument(key, one, grammar), is_required) for key, (one, is_required) in parameters.items()]
        return f"{grammar.literal(name + self.name_end)} {grammar.members(arguments, '')}"

    def _argument(self, key: str, schema: Schema, grammar: CallGrammar) -> str:
        opening = grammar.literal(self.key_start + key + self.key_end)
        types = types_of(schema)
        if types and "string" not in types:
            return f"{opening} {grammar.json(schema)} {grammar.literal(self.value_end)}"
        if types == {"string"} and (options := string_options(schema)):
            return f"{opening} {alternatives([*map(grammar.literal, options)])} {grammar.literal(self.value_end)}"
        return f"{opening} {grammar.text_up_to(self.value_end)}"


@dataclass(frozen=True, slots=True)
class PythonicCall(CallSyntax):
    """`f(city="Rome", days=3)`: a call with keywords in Python's syntax."""

    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        name = yield from _read_name(source)
        yield from source.expect("(")
        yield _called(name, offered)
        opening = "{"
        try:
            while not (yield from source.finds(")")):
                if opening != "{":
                    yield from source.expect(",")
                key = yield from _read_name(source)
                yield from source.expect("=")
                value = yield from self._read_value(source)
                yield f"{opening}{json_of(key)}: {value}"
                opening = ", "
        except NotInFormatError:
            yield _closed(opening)
            raise
        yield _closed(opening)

    def _read_value(self, source: IncomingText) -> Waiting[str]:
        """Returns the next keyword's value as JSON."""
        depth, quote, is_escaped = 0, "", False

        def goes_on(char: str) -> bool:
            nonlocal depth, quote, is_escaped
            if quote:
                quote, is_escaped = quote if is_escaped or char != quote else "", char == "\\" and not is_escaped
            elif char in "\"'":
                quote = char
            elif not depth and char in ",)":
                return False
            else:
                depth += (char in "([{") - (char in ")]}")
            return True

        text = (yield from source.while_char(goes_on)).strip()
        for parse in (json.loads, ast.literal_eval):
            try:
                return json_of(parse(text))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
        return json_of(text)

    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        arguments = [
            (f"{grammar.literal(f'{key}=')} {self._value(one, grammar)}", is_required)
            for key, (one, is_required) in parameters_of(schema).items()
        ]
        return f'{grammar.literal(f"{name}(")} {grammar.members(arguments, ", ")} ")"'

    def _value(self, schema: Schema, grammar: CallGrammar) -> str:
        return '("True" | "False")' if types_of(schema) == {"boolean"} else grammar.json(schema)


@dataclass(frozen=True, slots=True)
class BareKeyCall(CallSyntax):
    """`f{city:<|"|>Rome<|"|>,days:3}`: JSON whose keys have no quotes, and whose strings stand between `quote`."""

    quote: str

    def read(self, source: IncomingText, offered: Offered) -> CallReading:
        name = yield from _read_name(source)
        if (yield from source.next_char()) != "{":
            raise NotInFormatError("arguments")
        yield _called(name, offered)
        yield from self._read_value(source)

    def _read_value(self, source: IncomingText) -> Telling[None]:
        if (yield from source.finds(self.quote)):
            yield '"'
            yield from _read_text(source, self.quote)
            yield '"'
        elif (yield from source.finds("[")):
            yield from self._read_members(source, "[", "]")
        elif (yield from source.finds("{")):
            yield from self._read_members(source, "{", "}")
        else:
            text = yield from source.while_char(lambda char: char not in ",]}")
            yield from_text(text.strip(), {})

    def _read_members(self, source: IncomingText, opening: str, closing: str) -> Telling[None]:
        yield opening
        is_first = True
        while not (yield from source.finds(closing)):
            if not is_first:
                yield from source.expect(",")
                yield ", "
            if opening == "{":
                yield from self._read_key(source)
            yield from self._read_value(source)
            is_first = False
        yield closing

    def _read_key(self, source: IncomingText) -> Telling[None]:
        if (yield from source.finds(self.quote)):
            key = yield from source.until(self.quote)
            yield from source.expect(":")
        else:
            key = (yield from source.until(":")).strip()
        yield f"{json_of(key)}: "

    def grammar(self, name: str, schema: Schema, grammar: CallGrammar) -> str:
        text = self._text(grammar)
        atom = grammar.json({"type": ["number", "boolean", "null"]})
        pair = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {_ANY}'
        grammar.rule(f'{text} | {atom} | "[" {_repeated(_ANY)} "]" | "{{" {_repeated(pair)} "}}"', name=_ANY)
        return f"{grammar.literal(name)} {self._object(schema, grammar)}"

    def _object(self, schema: Schema, grammar: CallGrammar) -> str:
        members = [
            (f"{grammar.literal(f'{key}:')} {self._value(one, grammar)}", is_required)
            for key, (one, is_required) in sorted(parameters_of(schema).items())
        ]
        return f'"{{" {grammar.members(members, ",")} "}}"'

    def _value(self, schema: Schema, grammar: CallGrammar) -> str:
        types = types_of(schema)
        if types == {"string"}:
            texts = [grammar.literal(f"{self.quote}{one}{self.quote}") for one in string_options(schema)]
            return alternatives(texts) if texts else self._text(grammar)
        if types == {"object"} and "properties" in schema:
            return self._object(schema, grammar)
        if types == {"array"} and isinstance(schema.get("items"), Mapping):
            return f'"[" {_repeated(grammar.rule(self._value(schema["items"], grammar)))} "]"'
        return grammar.json(schema) if types and types <= _ATOMS else _ANY

    def _text(self, grammar: CallGrammar) -> str:
        return f"{grammar.literal(self.quote)} {grammar.text_up_to(self.quote)}"


_ANY = "any_value"
"""The rule for a value whose type is not known."""
_ATOMS = frozenset({"integer", "number", "boolean", "null"})


def _repeated(rule: str) -> str:
    return f'({rule} ("," {rule})*)?'


def _begun(called: Called, arguments: Telling[None]) -> CallReading:
    """Tells the call as soon as its arguments begin."""
    has_begun = False
    for part in arguments:
        if part is not None and not has_begun:
            has_begun = True
            yield called
        yield part


def _read_arguments(source: IncomingText) -> Telling[None]:
    """Tells arguments in JSON. They may be null, or stand in a JSON string, as some models write them."""
    if (yield from source.next_char()) == "{":
        yield from read_container(source)
        return
    value = json.loads((yield from read_value(source)))
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise NotInFormatError("arguments") from error
    if value is not None and not isinstance(value, dict):
        raise NotInFormatError("arguments")
    yield json_of(value or {})


def _read_name(source: IncomingText) -> Waiting[str]:
    yield from source.next_char()
    return (yield from source.while_char(lambda char: char.isalnum() or char in "_.-"))


def _read_text(source: IncomingText, end: str) -> Telling[None]:
    """Tells a text as it stands within quotes in JSON, up to `end`, which it reads, too. The blanks before `end` need
    not be there."""
    mark = end.lstrip()
    try:
        while (found := source.text.find(mark, source.at)) < 0:
            yield escaped(source.take(source.num_certain(end, mark)))
            yield from source.more()
    except EndOfTextError:
        yield escaped(source.take(len(source.text) - source.at)) + '"'
        raise
    yield escaped(source.take(found - source.at).removesuffix(end.removesuffix(mark)))
    source.take(len(mark))


def _closed(opening: str) -> str:
    """Returns the end of an object whose next member would begin with `opening`."""
    return "{}" if opening == "{" else "}"
