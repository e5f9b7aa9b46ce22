"""Typed files of a plan: unknown fields are errors, and errors name field, limit and value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class PlanError(ValueError):
    """An invalid load, SLO or costs file. The message names the field, its limit and its value."""


class PlanSettings(BaseModel):
    """A group of figures. A misspelt field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def checked(cls, values: Mapping[str, Any], source: str) -> Self:
        """Returns the settings of `values`. Raises PlanError that names `source` and each wrong field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PlanError("; ".join(_problem(source, dict(one)) for one in error.errors())) from error


def _problem(source: str, error: dict[str, Any]) -> str:
    field = ".".join(map(str, error["loc"]))
    given = "" if error["type"] == "missing" else f", not {error['input']!r}"
    return f"{source}: {field}: {error['msg']}{given}" if field else f"{source}: {error['msg']}"


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON or YAML file. Raises PlanError unless it holds a mapping."""
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path}: must hold fields with values, not {type(values).__name__}")
    return values
