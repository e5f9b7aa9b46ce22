"""Finds tool calls in a model's text as it streams, and builds the grammar that forces one."""

import json
import uuid

from raylens.deployments.api.tools import FunctionCall, OfferedTools, ToolCall
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.detokenizer import overlap
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import ToolCallFormat

# The way models write JSON. With free whitespace, an undecided model could write blanks endlessly.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolCallParser:
    """Extracts the calls of offered functions from one answer's text. Anything else that resembles a call is text."""

    def __init__(self, form: ToolCallFormat, names: set[str]) -> None:
        self._start, self._end = form.start.strip(), form.end.strip()
        self._names = names
        self._held_back = ""
        self._is_behind_call = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Takes the next part of the answer's text. Returns the text and the calls that are certain now."""
        rest = self._held_back + text
        told, calls = "", list[ToolCall]()
        while (start := rest.find(self._start)) >= 0:
            found = self._call_at(rest, start + len(self._start))
            if found is None:
                break
            call, end = found
            if call is None:  # one may begin later
                told += self._text(rest[:end])
            else:
                told += self._text(rest[:start].rstrip("\n"))
                calls.append(call)
                self._is_behind_call = True
            rest = rest[end:]
        certain = start if start >= 0 else len(rest) - overlap(rest, self._start)
        certain = len(rest[:certain].rstrip("\n"))  # newlines before a call are part of it
        self._held_back = rest[certain:]
        return told + self._text(rest[:certain]), calls

    def _text(self, text: str) -> str:
        """Returns the text without the newlines between a call and what follows it."""
        if self._is_behind_call:
            text = text.lstrip("\n")
            self._is_behind_call = not text
        return text

    def flush(self) -> str:
        """Returns the text held back, at the end of the answer."""
        text, self._held_back = self._text(self._held_back), ""
        return text

    def _call_at(self, text: str, start: int) -> tuple[ToolCall | None, int] | None:
        """Returns the call whose JSON begins at `start`, and the position after it. Without a call there, the position
        is after the opening tag. Returns None while more text may decide."""
        end = text.find(self._end, start)
        while end >= 0:
            try:
                return self._call(json.loads(text[start:end])), end + len(self._end)
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated string"):
                    return None, start
                end = text.find(self._end, end + 1)  # that tag was in a string
            except (ValueError, RecursionError):  # no call, or more digits than Python takes
                return None, start
        return None

    def _call(self, call: object) -> ToolCall:
        """Returns the call. Raises ValueError if its function was not offered, or its arguments are not valid JSON."""
        match call:
            case {"name": str(name), "arguments": dict(arguments)} if name in self._names:
                text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=FunctionCall(name=name, arguments=text))
        raise ValueError("no call of an offered tool")


class AnswerText:
    """Splits one answer's pieces into text and tool calls. `form`: the calls' form; None: there can be none."""

    def __init__(self, form: ToolCallFormat | None, offered: OfferedTools) -> None:
        names = {tool.function.name for tool in offered.tools}
        self._parser = None if form is None else ToolCallParser(form, names)

    def add(self, piece: GeneratedText) -> tuple[str, list[ToolCall]]:
        """Returns the text and the calls that the piece makes certain."""
        if self._parser is None:
            return piece.text, []
        text, calls = self._parser.feed(piece.text)
        return text + (self._parser.flush() if piece.finish_reason is not None else ""), calls


def forced_call(form: ToolCallFormat | None, offered: OfferedTools) -> StructuredOutput | None:
    """Returns the grammar of an answer that must call a tool, or None if it need not. Unless `offered.is_single`,
    several calls in a row are possible. `form`: the model's form of calls, if it has one."""
    if form is None or not offered.forced:
        return None
    rules = []
    for index, tool in enumerate(offered.forced):
        schema = json.dumps({**(tool.function.parameters or {"type": "object"}), "x-guidance": _SPACING})
        opening = json.dumps('{"name": ' + json.dumps(tool.function.name) + ', "arguments": ')
        rules.append(f'call_{index}: {opening} args_{index} "}}"\nargs_{index}: %json {schema}')
    any_call = " | ".join(f"call_{index}" for index in range(len(offered.forced)))
    call = f"call: {json.dumps(form.start)} ({any_call}) {json.dumps(form.end)}"
    start = "start: call" if offered.is_single else 'start: call ("\\n" call)*'
    return StructuredOutput(grammar="\n".join(["%llguidance {}", start, call, *rules]))
