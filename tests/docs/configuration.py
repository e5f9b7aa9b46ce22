"""Writes docs/configuration.md, the reference of all settings, from their classes."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from raylens.deployments.config import AppConfig, ModelConfig

_PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
_INTRODUCTION = """\
# Configuration

`python -m tests.docs.configuration` writes this page from the classes of the settings. They are the `args` of the
application in [serve.yaml](../serve.yaml), for `raylens serve --config serve.yaml` and `raylens deploy serve.yaml`.
`raylens serve` also takes each one by its full name, such as `--set generate.engine.block_size=32`.
"""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
Schema = Mapping[str, Any]


def page() -> str:
    schema = AppConfig.model_json_schema()
    defaults = AppConfig().model_dump(mode="json")
    parts = [_INTRODUCTION]
    for title, is_of_model in (("Settings of each model", True), ("Settings of the endpoint", False)):
        fields = {name: one for name, one in schema["properties"].items() if _is_of_model(name) == is_of_model}
        parts += [f"## {title}\n", *_group(fields, defaults, schema["$defs"])]
    return "\n".join(parts)


def _is_of_model(name: str) -> bool:
    return name in ModelConfig.model_fields


def _group(fields: Schema, defaults: Schema, classes: Schema, prefix: str = "") -> Iterator[str]:
    """Yields the table of a group's own settings, then the groups in it."""
    groups = {name: classes[field["$ref"].rpartition("/")[2]] for name, field in fields.items() if "$ref" in field}
    if rows := [_row(name, field, defaults[name]) for name, field in fields.items() if name not in groups]:
        yield "\n".join(["| Setting | Type | Default | Meaning |", "|---|---|---|---|", *rows, ""])
    for name, group in groups.items():
        meaning = _line(fields[name].get("description") or group["description"]).removesuffix(".")
        yield f"### `{prefix}{name}`\n\n{fill(f'{meaning[0].upper()}{meaning[1:]}.', 120)}\n"
        yield from _group(group["properties"], defaults[name], classes, f"{prefix}{name}.")


def _row(name: str, field: Schema, default: Any) -> str:
    is_bytes = name == "bytes" or name.endswith("_bytes")
    return f"| `{name}` | {_type(field)} | {_value(default, is_bytes)} | {_line(field['description'])} |"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _type(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{name}`" for name in field["enum"])
    bounds = (f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if key in field)
    return f"{field['type']} {', '.join(bounds)}".strip()


def _value(default: Any, is_bytes: bool) -> str:
    if isinstance(default, str):
        return f"`{default}`"
    if not isinstance(default, int | float) or isinstance(default, bool):
        return json.dumps(default)
    if is_bytes:
        size, unit = next((size, unit) for size, unit in _UNITS if default % size == 0)
        return f"{default // size} {unit}"
    return f"{default:,}".removesuffix(".0") if default >= 10_000 else f"{default:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes docs/configuration.md, or with `--check` returns 1 if it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.configuration", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args(argv)
    text = page()
    if not args.check:
        _PAGE.write_text(text, encoding="utf-8")
    elif not _PAGE.exists() or _PAGE.read_text(encoding="utf-8") != text:
        print(f"{_PAGE.name} is out of date: run `{parser.prog}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
