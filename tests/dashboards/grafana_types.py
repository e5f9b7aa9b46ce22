"""Grafana's schema of dashboards, in the types that Grafana's SDK has made of it.

The SDK reads and writes any JSON. Here it is held to its types."""

import json
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

_TYPES_OF_THE_SDK = "grafana_foundation_sdk"


def schema_violations(dashboard: dict[str, Any]) -> list[str]:
    """What in the dashboard, or in the queries and options of its panels, is not as Grafana's schema has it."""
    register_default_plugins()
    typed = Dashboard.from_json(dashboard)
    written = json.loads(json.dumps(typed, cls=JSONEncoder))
    return [*_differences(dashboard, written, "dashboard"), *_ill_typed(typed, "dashboard")]


def _differences(given: Any, written: Any, place: str) -> Iterator[str]:
    """Fields that the SDK does not know are lost on the way through it, and those that have to be there are added."""
    if isinstance(given, dict) and isinstance(written, dict):
        for name in sorted(given.keys() | written.keys()):
            if name not in written:
                yield f"{place}.{name} is unknown"
            elif name not in given:
                yield f"{place}.{name} is missing"
            else:
                yield from _differences(given[name], written[name], f"{place}.{name}")
    elif isinstance(given, list) and isinstance(written, list):
        for index, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from _differences(one, other, f"{place}[{index}]")
    elif given != written:
        yield f"{place} is {given!r}"


def _ill_typed(value: object, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _ill_typed(one, f"{place}[{index}]")
    elif type(value).__module__.startswith(_TYPES_OF_THE_SDK) and not isinstance(value, Enum):
        for name, hint in typing.get_type_hints(type(value)).items():
            held = getattr(value, name)
            if not _fits(held, hint):
                yield f"{place}.{name} is {held!r}"
            yield from _ill_typed(held, f"{place}.{name}")


def _fits(value: object, hint: Any) -> bool:
    # Numbers and texts of enumerations come out of JSON as they are, so those may be converted.
    adapter = TypeAdapter[object](hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        adapter.validate_json(json.dumps(value)) if _is_plain(value) else adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)
