"""A function's parameters, by the JSON schema of its arguments."""

import json
from collections.abc import Mapping
from typing import Any

from raylens.preprocess.tool_calls.call_grammar import Schema
from raylens.preprocess.tool_calls.json_text import json_of

_OF_PYTHON = {"True": True, "False": False, "None": None}
"""Some templates write these in earlier calls, and models repeat them."""
_DEFINITIONS, _REFERENCE = ("$defs", "definitions"), "$ref"


def parameters_of(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """Returns each parameter's schema, with the definitions that it refers to, and whether it is required."""
    schema = _resolved(schema)
    properties, required = schema.get("properties"), schema.get("required")
    shared = _definitions_of(schema)
    needed = {one for one in required if isinstance(one, str)} if isinstance(required, list) else set()
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: ({**shared, **one} if _REFERENCE in repr(one) else one, name in needed)
        for name, one in ((name, one if isinstance(one, Mapping) else {}) for name, one in properties.items())
    }


def _resolved(schema: Schema) -> Schema:
    """Returns what a schema refers to within itself, or the schema."""
    reference = schema.get(_REFERENCE)
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = schema
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return {**_definitions_of(schema), **found} if isinstance(found, Mapping) else schema


def _definitions_of(schema: Schema) -> dict[str, Any]:
    return {key: schema[key] for key in _DEFINITIONS if key in schema}


def types_of(schema: Schema) -> frozenset[str]:
    """Returns the JSON types that the schema names itself, or none if it names none, so that all are possible."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {name for name in names if isinstance(name, str)}
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        types = {_type_of(value) for value in values} if isinstance(values, list) else set()
    for union in ("anyOf", "oneOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) else ():
            own = types_of(option) if isinstance(option, Mapping) else frozenset[str]()
            if not own:
                return own
            types |= own
    return frozenset(types)


def string_options(schema: Schema) -> list[str]:
    """Returns the strings that the schema enumerates, or none if it enumerates none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []


def from_text(text: str, schema: Schema) -> str:
    """Returns the JSON of an argument that is written without quotes around strings."""
    types = types_of(schema)
    if types != {"string"}:
        try:
            value = _OF_PYTHON[text] if text in _OF_PYTHON else json.loads(text)
            kind, written = _type_of(value), json_of(value)
        except (ValueError, RecursionError):
            return json_of(text)
        if kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types)):
            return written
    return json_of(text)


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
