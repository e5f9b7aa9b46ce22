"""The required form of an answer, and the checks of this form; `grammar.py` enforces it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raylens.preprocess.schema import InvalidRequestError

MAX_GRAMMAR_CHARS = 131072
MAX_CHOICES = 1024

ANY_JSON_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Exactly one of these is set:

    - `json_schema`: the answer is JSON valid against this schema, given as an object or as JSON text
    - `json_object`: the answer is any JSON object
    - `regex`: the whole answer matches, in the syntax of Rust's regex crate, without look-around and references;
      `\\d` and `\\w` are ASCII
    - `grammar`: the answer derives from `start` of a Lark grammar, or from `root` of a GBNF one
    - `choice`: the answer is one of these texts

    Raises InvalidRequestError with the field. `grammar.GrammarCompiler.compile` checks later whether a schema, regex or
    grammar can be compiled."""

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        wanted = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(wanted) != 1:
            raise InvalidRequestError(
                f"must set exactly one of {', '.join(one.name for one in fields(self))},"
                f" got {', '.join(wanted) or 'none'}",
                field="structured_output",
            )
        field, text = self.specification
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(f"must be at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", field=field)

    @property
    def specification(self) -> tuple[str, str]:
        """Returns the name of the set field and its value as text. The pair is a valid cache key: equal pairs mean
        equal forms."""
        if self.json_schema is not None:
            return "json_schema", _schema_text(self.json_schema)
        if self.json_object:
            return "json_object", ANY_JSON_OBJECT
        if self.choice is not None:
            return "choice", _choice_text(self.choice)
        if self.regex is not None:
            return "regex", self.regex
        assert self.grammar is not None, "checked when it was made"
        return "grammar", self.grammar


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """Returns the schema as JSON, with its keys in order, because the answer's properties follow the schema's order.

    Raises InvalidRequestError for anything but a JSON object."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"must be JSON, got {str(schema)[:100]!r}", field="json_schema") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"must be a JSON object, got {text[:100]}", field="json_schema")
    return text


def _choice_text(choice: tuple[str, ...]) -> str:
    if not 0 < len(choice) <= MAX_CHOICES:
        raise InvalidRequestError(f"must be 1 to {MAX_CHOICES} texts, got {len(choice)}", field="choice")
    if not all(choice):
        raise InvalidRequestError("must be texts of at least 1 character, got one of 0", field="choice")
    return json.dumps(choice)
