"""The grammar of an answer that must call a tool, in llguidance's dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raylens.preprocess.schema import InvalidRequestError

Schema = Mapping[str, Any]
"""A JSON schema."""

# The way models write JSON. With free whitespace, an undecided model could write blanks endlessly.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallGrammar:
    """The rules so far. `special_tokens`: ids by text, for the model's special tokens, whose text no other tokens may
    spell. `max_chars`: of all rules. A rule beyond it raises InvalidRequestError."""

    def __init__(self, special_tokens: Mapping[str, int], max_chars: int) -> None:
        self._special_tokens = special_tokens
        self._max_chars = max_chars
        self._num_chars = 0
        self._rules: dict[str, str] = {}

    def text(self, start: str) -> str:
        """Returns the whole grammar. `start`: what an answer is."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules.values()])

    def rule(self, body: str, *, name: str = "", options: str = "") -> str:
        """Adds a rule, or replaces the one of the `name`, and returns its name."""
        name = name or f"rule_{len(self._rules)}"
        self._rules[name] = f"{name}{options}: {body}"
        self._num_chars += len(body)
        if self._num_chars > self._max_chars:
            reason = f"their grammar must be at most {self._max_chars} characters, got at least {self._num_chars}"
            raise InvalidRequestError(reason, field="grammar")
        return name

    def literal(self, text: str) -> str:
        """Returns what stands for a text. Its special tokens stand for themselves."""
        return " ".join(self._token(part) or json.dumps(part) for part in self._parts(text) if part)

    def json(self, schema: Schema) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}")

    def text_up_to(self, marker: str) -> str:
        """Returns any text and the marker behind it."""
        before, *others = self._parts(marker)
        if not others:
            return self.rule("/(?s:.*)/", options=f"[suffix={json.dumps(marker)}]")
        # A token ends the text, whose own end is what stands before the token.
        ending = re.escape(before).replace("\n", "n").replace("/", r"\/")
        return f"{self.rule(f'/(?s:.*){ending}/')} {self.literal(''.join(others))}"

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Returns the members in their order, those that are not required (False) or not. `separator`: text between
        two."""
        between = json.dumps(separator) if separator else ""
        behind, none_yet = '""', '""'
        for member, is_required in reversed(members):
            going_on, beginning = f"{between} {member} {behind}", f"{member} {behind}"
            behind = self.rule(going_on if is_required else f"{going_on} | {behind}")
            none_yet = self.rule(beginning if is_required else f"{beginning} | {none_yet}")
        return none_yet

    def _parts(self, text: str) -> list[str]:
        """Returns the text cut at its special tokens: a text and a token in turns."""
        special = "|".join(map(re.escape, sorted(self._special_tokens, key=len, reverse=True)))
        return re.split(f"({special})", text) if special else [text]

    def _token(self, text: str) -> str:
        return f"<[{self._special_tokens[text]}]>" if text in self._special_tokens else ""


def alternatives(rules: Sequence[str]) -> str:
    return f"({' | '.join(rules)})"
