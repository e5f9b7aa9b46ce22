"""Tells an answer's tool calls from its text, and makes the sampling parameters of answers with calls."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raylens.deployments.api.tools import OfferedTools, Tool
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.reader import CallPart, ToolCallReader


class AnswerText:
    """Splits one answer's pieces into text and tool calls. `form`: the calls' form; None: there can be none."""

    def __init__(self, form: ToolCallFormat | None, offered: OfferedTools) -> None:
        self._reader = None if form is None else ToolCallReader(form, _parameters(offered.tools))
        self._is_single = offered.is_single

    def add(self, piece: GeneratedText) -> tuple[str, list[CallPart]]:
        """Returns the text and the parts of calls that the piece makes certain."""
        if self._reader is None:
            return piece.text, []
        text, parts = self._reader.feed(piece.text, is_last=piece.finish_reason is not None)
        return text, [part for part in parts if part.index == 0] if self._is_single else parts


def _parameters(tools: list[Tool]) -> Mapping[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}


def forced_call(form: ToolCallFormat | None, offered: OfferedTools) -> StructuredOutput | None:
    """Returns the grammar of an answer that must call a tool, or None if it need not. Unless `offered.is_single`,
    several calls in a row are possible. `form`: the model's form of calls, if it has one."""
    if form is None or not offered.forced:
        return None
    return StructuredOutput(grammar=form.grammar(_parameters(offered.forced), is_single=offered.is_single))


def with_marks(params: SamplingParams, form: ToolCallFormat | None) -> SamplingParams:
    """Returns the parameters with which an answer's text has the marks of calls, which may be special tokens."""
    return replace(params, skip_special_tokens=False) if form is not None and form.special_tokens else params
