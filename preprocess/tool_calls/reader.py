"""Finds the tool calls in an answer's text while it comes."""

from collections.abc import Generator
from dataclasses import dataclass, replace

from raylens.preprocess.tool_calls.call_syntax import Called, Offered
from raylens.preprocess.tool_calls.formats import ToolCallFormat
from raylens.preprocess.tool_calls.incoming_text import EndOfTextError, IncomingText, NotInFormatError


@dataclass(frozen=True, slots=True)
class CallPart:
    """The next part of a call's arguments. `name`, `id`: of the call, in its first part only."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


_Found = Generator[CallPart | str | None, None, None]
"""Yields text and calls as they become certain, and None where it needs more text."""


class ToolCallReader:
    """Reads one answer. A call begins once its function's name is known and offered, and goes on as it is written: its
    arguments are not checked. A call that does not end is a call. Anything else that resembles a call is text."""

    def __init__(self, form: ToolCallFormat, offered: Offered) -> None:
        self._format = form
        self._offered = offered
        self._source = IncomingText()
        self._num_calls = 0
        self._returns_to: int | None = 0
        """Where text begins if what is read there is no call. None: a call has begun."""
        self._newlines = ""
        """The newlines before the mark, which a call takes with it."""
        self._is_behind_call = False
        self._reading = self._answer()

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[CallPart]]:
        """Takes the next part of the answer's text. Returns the text and the parts of calls that are certain now."""
        self._source.text += text
        self._source.is_whole = is_last
        told, parts = "", list[CallPart]()
        for found in self._reading:
            if found is None:
                break
            if isinstance(found, str):
                told += found
            elif parts and parts[-1].index == found.index:
                parts[-1] = replace(parts[-1], arguments=parts[-1].arguments + found.arguments)
            else:
                parts.append(found)
        return told, parts

    def _answer(self) -> _Found:
        source = self._source
        try:
            if self._format.is_alone:
                yield from self._section()
                yield from self._skip_newlines()
            while not self._format.is_alone:
                yield from self._text()
                yield from self._section()
            while True:
                yield source.take(len(source.text) - source.at)
                yield from source.more()
        except EndOfTextError:
            yield source.take(len(source.text) - source.at)

    def _text(self) -> _Found:
        """Tells the text up to the mark of a call, without the newlines before it and behind an earlier call."""
        source, mark = self._source, self._format.mark
        yield from self._skip_newlines()
        while (found := source.text.find(mark, source.at)) < 0:
            certain = source.text[source.at :][: source.num_certain(mark)].rstrip("\n")
            yield source.take(len(certain))
            yield from source.more()
        text = source.take(found - source.at)
        self._newlines = text[len(text.rstrip("\n")) :]
        yield text.rstrip("\n")

    def _skip_newlines(self) -> _Found:
        """Skips the newlines behind a call."""
        while self._is_behind_call and (yield from self._source.some())[0] == "\n":
            self._source.take(1)
        self._is_behind_call = False

    def _section(self) -> _Found:
        """Tells the calls at the mark. Without any, the mark is text."""
        source = self._source
        source.forget()
        self._returns_to = 0
        try:
            yield from self._calls()
        except (NotInFormatError, RecursionError) as error:  # the second: brackets within brackets
            is_end = isinstance(error, EndOfTextError)
            if self._returns_to is None:  # what follows a broken call is text, but no part of a mark
                source.at = len(source.text) if is_end else source.at
                yield from source.finds(self._format.end)
                return
            source.at = self._returns_to
            if self._returns_to == 0:
                yield self._newlines + source.take(len(source.text) if is_end else len(self._format.mark))

    def _calls(self) -> _Found:
        source, form = self._source, self._format
        separator = form.separator.strip()
        yield from source.expect(form.begin)
        yield from source.expect(form.start)
        while True:
            yield from self._call()
            yield from source.expect(form.end)
            self._returns_to = source.at
            if not (yield from source.finds(separator or form.start)):
                break
            yield from source.expect(form.start if separator else "")
        yield from source.finds(form.finish)

    def _call(self) -> _Found:
        index = self._num_calls
        for told in self._format.syntax.read(self._source, self._offered):
            if isinstance(told, Called):
                self._num_calls += 1
                self._returns_to, self._is_behind_call = None, True
                yield CallPart(index, "", told.name, self._format.new_id(told.name, index))
            elif told is None:
                yield None
            elif told:
                yield CallPart(index, told)
