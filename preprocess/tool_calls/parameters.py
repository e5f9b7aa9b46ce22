"""A function's parameters, by the JSON schema of its arguments."""

import json
from collections.abc import Mapping
from typing import Any

from raylens.preprocess.tool_calls.call_grammar import Schema

_OF_PYTHON = {"True": True, "False": False, "None": None}
"""Some templates write these in earlier calls, and models repeat them."""
_DEFINITIONS = ("$defs", "definitions")


def parameters_of(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """Returns each parameter's schema, with the definitions that it may refer to, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    is_required = set(required) if isinstance(required, list) else set()
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: ({**shared, **one} if isinstance(one, Mapping) else shared, name in is_required)
        for name, one in properties.items()
    }


def types_of(schema: Schema) -> frozenset[str]:
    """Returns the JSON types that the schema names itself. None are named: any is possible."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set[str]()
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        types = {_type_of(value) for value in values} if isinstance(values, list) else set()
    for union in ("anyOf", "oneOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) else ():
            types |= types_of(option) if isinstance(option, Mapping) else set()
    return frozenset(types)


def string_options(schema: Schema) -> list[str]:
    """Returns the strings that the schema enumerates, or none if it enumerates none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []


def from_text(text: str, schema: Schema) -> Any:
    """Returns the value of an argument that is written without quotes around strings."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    try:
        value = _OF_PYTHON[text] if text in _OF_PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = _type_of(value)
    is_meant = kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types))
    return value if is_meant else text


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
