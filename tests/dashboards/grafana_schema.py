"""Grafana's schema of dashboards as a JSON Schema, built from the types of Grafana's SDK.

Grafana makes its own JSON Schema and these types of one source. Its JSON Schema leaves open what the queries, the
options and the fields of a panel have; the SDK knows it of each kind of panel and data source, and so does this one.
What it lacks are bounds of numbers."""

import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import MethodType
from typing import Any, Literal

from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import Runtime
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from jsonschema import Draft202012Validator

Schema = dict[str, Any]
_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def schema_violations(dashboard: Any) -> list[str]:
    """What in the dashboard, or in the queries, options and fields of its panels, is not as Grafana's schema has it."""
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(dashboard)]


@cache
def _validator() -> Any:
    register_default_plugins()
    schemas = _Schemas()
    return Draft202012Validator({**schemas.of(Dashboard), "$defs": schemas.definitions})


class _Schemas:
    """The schemas of types. Those of classes refer to each other by their names, in `definitions`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def of(self, hint: Any) -> Schema:
        arguments = typing.get_args(hint)
        if hint in (object, Any):
            return {}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        if typing.get_origin(hint) is list:
            return {"type": "array", "items": self.of(arguments[0])}
        if typing.get_origin(hint) is dict:
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if typing.get_origin(hint) is Literal:
            return {"enum": list(arguments)}
        if typing.get_origin(hint) is typing.Union:
            return self._union(arguments)
        if issubclass(hint, Enum):
            return {"enum": [member.value for member in hint]}
        return self._class(hint)

    def _union(self, members: tuple[Any, ...]) -> Schema:
        """Tells members that are classes apart by their `type`, so that a violation is one of the member meant."""
        tagged = {tag: member for member in members if (tag := _tag(member)) is not None}
        others: list[Any] = [self.of(member) for member in members if member not in tagged.values()] or [False]
        schema = others[0] if len(others) == 1 else {"anyOf": others}
        for tag, member in tagged.items():
            schema = {"if": _has("type", tag), "then": self.of(member), "else": schema}
        return schema

    def _class(self, kind: type) -> Schema:
        name = f"{kind.__module__}.{kind.__name__}"
        if name not in self.definitions:
            self.definitions[name] = {}  # it may be a part of itself
            self.definitions[name] = self._query() if kind is Dataquery else self._object(kind)
        return {"$ref": f"#/$defs/{name}"}

    def _object(self, kind: Any) -> Schema:
        hints = typing.get_type_hints(kind)
        # The class writes all of its fields, and those that are None only where there has to be something.
        names = _written(kind, {field: field for field in hints})
        required = _written(kind, dict.fromkeys(hints)).keys()
        fields = {
            name: self.of(hints[field] if name in required else _without_none(hints[field]))
            for name, field in names.items()
        }
        schema = {"type": "object", "properties": fields, "required": sorted(required), "additionalProperties": False}
        return schema | {"allOf": list(self._kinds_of_panel())} if kind is Panel else schema

    def _kinds_of_panel(self) -> Iterator[Schema]:
        """What a panel's options and fields are depends on its type."""
        kinds = Runtime().panelcfg_variants
        yield _one_of("type", kinds)
        for name, kind in kinds.items():
            options, custom = (
                {} if (read := _class_of(from_json)) is None else self.of(read)
                for from_json in (kind.options_from_json_hook, kind.field_config_from_json_hook)
            )
            fields = {"properties": {"defaults": {"properties": {"custom": custom}}}}
            yield {"if": _has("type", name), "then": {"properties": {"options": options, "fieldConfig": fields}}}

    def _query(self) -> Schema:
        """What a query is depends on its data source."""
        variants = Runtime().dataquery_variants
        kinds = {name: read for name, kind in variants.items() if (read := _class_of(kind.from_json_hook)) is not None}
        known = {"datasource": {"required": ["type"], **_one_of("type", kinds)}}
        choices = [
            {"if": {"properties": {"datasource": _has("type", name)}}, "then": self.of(kind)}
            for name, kind in kinds.items()
        ]
        return {"type": "object", "required": ["datasource"], "properties": known, "allOf": choices}


def _has(name: str, value: str) -> Schema:
    return {"required": [name], "properties": {name: {"const": value}}}


def _one_of(name: str, values: Mapping[str, object]) -> Schema:
    return {"properties": {name: {"enum": sorted(values)}}}


def _class_of(from_json: object) -> type | None:
    """The class of which this is the method. The queries of two data sources are several classes, by a function."""
    return from_json.__self__ if isinstance(from_json, MethodType) else None  # type: ignore[return-value]


def _written(kind: Any, fields: Mapping[str, str | None]) -> dict[str, Any]:
    """What an object of the class with these fields writes, as it is: by the names of JSON."""
    blank = object.__new__(kind)
    vars(blank).update(fields)
    written: dict[str, Any] = blank.to_json()
    return written


def _without_none(hint: Any) -> Any:
    others = tuple(one for one in typing.get_args(hint) if one is not type(None))
    return typing.Union[others] if typing.get_origin(hint) is typing.Union else hint  # noqa: UP007


def _tag(kind: Any) -> str | None:
    """The only `type` that objects of the class have, if there is only one."""
    hint = typing.get_type_hints(kind).get("type_val") if isinstance(kind, type) else None
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Literal else None
