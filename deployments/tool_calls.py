"""Calls of tools in a model's text: how they are found while it streams, and how one is forced."""

import json
import uuid
from collections.abc import Sequence

from deployments.api.tools import FunctionCall, Tool, ToolCall
from llm.detokenizer import overlap
from llm.structured_output import StructuredOutput
from preprocess.schema import ToolCallFormat


class ToolCallParser:
    """Takes the calls out of one answer's text. What only looks like a call, or calls what was not offered, is text."""

    def __init__(self, form: ToolCallFormat, names: set[str]) -> None:
        self._start, self._end = form.start.strip(), form.end.strip()
        self._names = names
        self._held_back = ""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that `text`, the next of the answer's, makes certain."""
        rest = self._held_back + text
        told, calls = "", list[ToolCall]()
        while (start := rest.find(self._start)) >= 0:
            end = rest.find(self._end, start)
            if end < 0:
                break
            body = rest[start + len(self._start) : end]
            call = self._call(body)
            if call is None:
                told += rest[: end + len(self._end)]
            else:
                told += rest[:start].rstrip("\n")
                calls.append(call)
            rest = rest[end + len(self._end) :]
            rest = rest.lstrip("\n") if call is not None else rest
        certain = start if start >= 0 else len(rest) - overlap(rest, self._start)
        self._held_back = rest[certain:]
        return told + rest[:certain], calls

    def flush(self) -> str:
        """What was held back of an answer that has ended."""
        text, self._held_back = self._held_back, ""
        return text

    def _call(self, body: str) -> ToolCall | None:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if name not in self._names or not isinstance(arguments, dict):
            return None
        function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function)


def call_grammar(form: ToolCallFormat, tools: Sequence[Tool], *, is_single: bool) -> StructuredOutput:
    """The form of an answer that calls one of `tools`, or, unless `is_single`, several calls one after another."""
    rules = []
    for index, tool in enumerate(tools):
        schema = json.dumps(tool.function.parameters or {"type": "object"})
        opening = json.dumps('{"name": ' + json.dumps(tool.function.name) + ', "arguments": ')
        rules.append(f'call_{index}: {opening} args_{index} "}}"\nargs_{index}: %json {schema}')
    any_call = " | ".join(f"call_{index}" for index in range(len(tools)))
    call = f"call: {json.dumps(form.start)} ({any_call}) {json.dumps(form.end)}"
    start = "start: call" if is_single else 'start: call ("\\n" call)*'
    return StructuredOutput(grammar="\n".join(["%llguidance {}", start, call, *rules]))
