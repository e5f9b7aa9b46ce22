"""Checks values against the annotated types of dataclass fields, including the contents of containers."""

import types
from collections.abc import Callable, Collection
from typing import Any, Union, get_args, get_origin

Check = Callable[[Any], bool]


def type_check(annotation: Any) -> Check:
    """Returns a predicate: is the value of the annotated type?"""
    kind, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: True
    if kind in (Union, types.UnionType):
        return _any_of([type_check(part) for part in parts])
    if kind is dict:
        return _dict_of(*map(type_check, parts))
    if kind in (list, tuple):  # tuples of any length
        return _items_of(kind, type_check(parts[0]))
    return _instance_of(kind or annotation)


def _instance_of(kind: type) -> Check:
    accepted = (int, float) if kind is float else kind
    return lambda value: isinstance(value, accepted)


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _items_of(kind: type[Collection[Any]], check: Check) -> Check:
    return lambda value: isinstance(value, kind) and all(map(check, value))


def _dict_of(check_key: Check, check_value: Check) -> Check:
    return lambda found: (
        isinstance(found, dict) and all(map(check_key, found)) and all(map(check_value, found.values()))
    )
