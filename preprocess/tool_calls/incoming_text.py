"""The text of an answer while it comes, read by generators that stop where they need more of it."""

from collections.abc import Callable, Generator
from typing import TypeVar

ReturnT = TypeVar("ReturnT")
Waiting = Generator[None, None, ReturnT]
"""Yields where it needs more text."""


class NotInFormatError(Exception):
    """The text is not what the format wants at this place."""


class EndOfTextError(NotInFormatError):
    """The answer ends within what the format wants."""


class IncomingText:
    """`text`: what has come so far. `at`: up to where it is read. `is_whole`: no more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_whole = False

    def take(self, num_chars: int) -> str:
        """Reads the next characters, which have come."""
        self.at += num_chars
        return self.text[self.at - num_chars : self.at]

    def forget(self) -> None:
        """Drops what is read. Positions change."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Waiting[None]:
        """Waits for more text. Raises EndOfTextError if there is none."""
        if self.is_whole:
            raise EndOfTextError
        yield

    def num_certain(self, *markers: str) -> int:
        """Returns the number of unread characters before any place where a marker may begin, none of which has come."""
        rest = self.text[self.at :]
        lengths = range(min(len(rest), max(map(len, markers)) - 1), 0, -1)
        held = next((n for n in lengths if any(one.startswith(rest[-n:]) for one in markers)), 0)
        return len(rest) - held

    def some(self) -> Waiting[str]:
        """Returns the unread text, at least one character of it."""
        while self.at == len(self.text):
            yield from self.more()
        return self.text[self.at :]

    def next_char(self) -> Waiting[str]:
        """Skips blanks. Returns the character behind them, unread."""
        while (yield from self.some())[0].isspace():
            self.at += 1
        return self.text[self.at]

    def finds(self, marker: str) -> Waiting[bool]:
        """Reads the marker if it comes next. Returns whether it does. The blanks around its words may differ."""
        begun = self.at
        for word in marker.split():
            yield from self.next_char()
            while word.startswith(rest := self.text[self.at :]) and rest != word:
                try:
                    yield from self.more()
                except EndOfTextError:
                    break
            if not rest.startswith(word):
                self.at = begun
                return False
            self.at += len(word)
        return True

    def expect(self, marker: str) -> Waiting[None]:
        """Reads the marker. Raises NotInFormatError if it does not come next."""
        if not (yield from self.finds(marker)):
            raise NotInFormatError(marker)

    def until(self, marker: str) -> Waiting[str]:
        """Returns the text before the marker, and reads both."""
        while (end := self.text.find(marker, self.at)) < 0:
            yield from self.more()
        found = self.take(end - self.at)
        self.at += len(marker)
        return found

    def while_char(self, goes_on: Callable[[str], bool]) -> Waiting[str]:
        """Returns the characters up to the first one that does not go on, which stays unread."""
        end = self.at
        while True:
            if end == len(self.text):
                yield from self.more()
            elif goes_on(self.text[end]):
                end += 1
            else:
                return self.take(end - self.at)
