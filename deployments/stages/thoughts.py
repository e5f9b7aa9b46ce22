"""Tells the thoughts at the beginning of an answer from the answer itself, while its text comes token by token."""

import enum

from raylens.llm.detokenizer import overlap
from raylens.preprocess.schema import ThoughtFormat


class _State(enum.Enum):
    BEGINNING = "nothing but blanks so far"
    THINKING = "within the thoughts"
    ENDED = "behind the end tag, nothing but blanks so far"
    ANSWERING = "within the answer"


class ThoughtSplitter:
    """Splits one answer. `is_open`: the prompt ends with the start tag. Otherwise the answer may begin with it; if it
    does not, there are no thoughts.

    The tags, and the blanks between a tag and text, belong to neither part."""

    def __init__(self, form: ThoughtFormat, *, is_open: bool) -> None:
        self._form = form
        self._state = _State.THINKING if is_open else _State.BEGINNING
        self._is_blank = True
        self._held_back = ""
        self._num_tokens = 0

    @property
    def num_thought_tokens(self) -> int:
        """Returns the number of tokens of the thoughts so far, those of the tags among them."""
        return 0 if self._state is _State.BEGINNING else self._num_tokens

    @property
    def is_answering(self) -> bool:
        """Returns whether all further text is the answer's."""
        return self._state is _State.ANSWERING

    def tag_of(self, token: bytes) -> str:
        """Returns the text of a token without text that is a tag or a part of one, or nothing. Some models' tags are
        special tokens, which answers leave out."""
        return token.decode() if any(token in tag.encode() for tag in (self._form.start, self._form.end)) else ""

    def feed(self, text: str) -> tuple[str, str]:
        """Takes the text of the next token. Returns what is certain now: thoughts, and the answer behind them."""
        self._num_tokens += self._state in (_State.BEGINNING, _State.THINKING)
        rest, self._held_back = self._held_back + text, ""
        thought = ""
        if self._state is _State.BEGINNING:
            rest = self._begin(rest)
        if self._state is _State.THINKING:
            thought, rest = self._think(rest)
        if self._state is _State.ENDED and (rest := rest.lstrip()):
            self._state = _State.ANSWERING
        return thought, rest

    def flush(self, text: str) -> tuple[str, str]:
        """Does as `feed` with the last text, which belongs to no token, and returns what was held back, too."""
        num_tokens = self._num_tokens
        thought, answer = self.feed(text)
        self._num_tokens, rest = num_tokens, self._held_back
        if self._state is _State.THINKING:
            return (thought + rest).rstrip(), answer
        return thought, answer + rest

    def _begin(self, text: str) -> str:
        """Returns the text behind the start tag, or the whole text if it cannot begin with the tag."""
        begun, tag = text.lstrip(), self._form.start
        if begun.startswith(tag):
            self._state = _State.THINKING
            return begun.removeprefix(tag)
        if tag.startswith(begun):
            self._held_back = text
            return ""
        self._state, self._num_tokens = _State.ANSWERING, 0
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """Returns the thoughts up to the end tag, and the text behind it. A part of the tag is held back, and blanks,
        because the tag may follow."""
        text = text.lstrip() if self._is_blank else text
        thought, tag, rest = text.partition(self._form.end)
        if tag:
            self._state = _State.ENDED
            return thought.rstrip(), rest
        certain = text[: len(text) - overlap(text, self._form.end)].rstrip()
        self._held_back = text[len(certain) :]
        self._is_blank = self._is_blank and not certain
        return certain, ""
