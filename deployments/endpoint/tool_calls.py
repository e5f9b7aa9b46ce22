"""Tells an answer's tool calls from its text, and makes the sampling parameters of answers with calls."""

from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from raylens.deployments.api.tools import OfferedTools
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import MAX_GRAMMAR_CHARS, StructuredOutput
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.reader import CallPart, ToolCallReader


class AnswerText:
    """Splits one answer's pieces into text and tool calls. `form`: the calls' form; None: there can be none."""

    def __init__(self, form: ToolCallFormat | None, offered: OfferedTools) -> None:
        self._reader = None if form is None else ToolCallReader(form, _parameters(offered))
        self._is_single = offered.is_single
        self._custom = offered.custom
        self._inputs: dict[int, _CustomInput] = {}

    def add(self, piece: GeneratedText) -> tuple[str, list[CallPart]]:
        """Returns the text and the parts of calls that the piece makes certain. The `arguments` of a custom tool are
        the text for it."""
        if self._reader is None:
            return piece.text, []
        text, parts = self._reader.feed(piece.text, is_last=piece.finish_reason is not None)
        return text, [self._told(part) for part in parts if part.index == 0 or not self._is_single]

    def _told(self, part: CallPart) -> CallPart:
        if part.name in self._custom:
            self._inputs[part.index] = _CustomInput()
        if part.index not in self._inputs:
            return part
        return replace(part, arguments=self._inputs[part.index].feed(part.arguments))


class _CustomInput:
    """Takes the text out of `{"input": "..."}` while it comes."""

    def __init__(self) -> None:
        self._json = ""
        self._num_told = 0

    def feed(self, arguments: str) -> str:
        """Returns the next part of the text."""
        self._json += arguments
        try:
            found = from_json(self._json or "{}", allow_partial="trailing-strings")
        except (ValueError, TypeError):  # the model wrote no JSON
            return ""
        text = found.get("input") if isinstance(found, dict) else None
        told = text[self._num_told :] if isinstance(text, str) else ""
        self._num_told += len(told)
        return told


def _parameters(offered: OfferedTools) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters or {"type": "object"} for tool in offered.allowed}


def forced_call(form: ToolCallFormat | None, offered: OfferedTools) -> StructuredOutput | None:
    """Returns the grammar of an answer that must call a tool, or None if it need not. Unless `offered.is_single`,
    several calls in a row are possible. `form`: the model's form of calls, if it has one."""
    if form is None or not offered.is_forced:
        return None
    grammar = form.grammar(_parameters(offered), is_single=offered.is_single, max_chars=MAX_GRAMMAR_CHARS)
    return StructuredOutput(grammar=grammar)


def with_marks(params: SamplingParams, form: ToolCallFormat | None) -> SamplingParams:
    """Returns the parameters with which an answer's text has the marks of calls, which may be special tokens."""
    return replace(params, skip_special_tokens=False) if form is not None and form.has_hidden_marks else params
