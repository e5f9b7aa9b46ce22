"""Follows the thoughts before an answer token by token: where they end, and how long they may become."""

import codecs
import enum

import numpy as np

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.excluded_tokens import IntArray
from raylens.preprocess.schema import ThoughtFormat

_MAX_TOKENS_OF_A_CHARACTER = 4


class _State(enum.Enum):
    BEGINNING = "nothing but blanks and a part of the start tag so far"
    THINKING = "within the thoughts"
    OVER = "behind them, or there are none"


class Thoughts:
    """The thoughts of one answer. `is_open`: the prompt ends with the start tag. Otherwise the answer may have the tag.
    `budget`: after so many tokens of thoughts, the end tag has to come; None: never.

    `opening_token_id`: the token that begins the thoughts, where the start tag is one token and they have not begun."""

    def __init__(
        self, tokenizer: ByteTokenizer, form: ThoughtFormat, *, is_open: bool, budget: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = form.start.encode(), form.end.encode()
        self._budget = budget
        self._end_ids = [] if budget is None else list(_spelling(tokenizer, form.end))
        self._forced: list[int] = []
        self._last = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._num_tokens = 0
        self._state = _State.THINKING if is_open else _State.BEGINNING
        opening = () if is_open else _spelling(tokenizer, form.start)
        self.opening_token_id = opening[0] if len(opening) == 1 else None
        self._force_end()

    @property
    def is_thinking(self) -> bool:
        return self._state is _State.THINKING

    @property
    def is_over(self) -> bool:
        return self._state is _State.OVER

    @property
    def forced_token_ids(self) -> IntArray | None:
        """Returns the only token that may come next, (1,), or None if any may."""
        return np.array(self._forced[:1], dtype=np.int64) if self._forced else None

    def append(self, token_id: int) -> None:
        self.opening_token_id = None
        token = self._tokenizer.token_bytes(token_id)
        if self._state is _State.BEGINNING:
            self._begin(token)
        else:
            self._num_tokens += 1
            self._forced = self._forced[1:]
            self._think(token)
        if not self._forced:
            self._force_end()

    def _begin(self, token: bytes) -> None:
        seen = (self._last + token).lstrip()
        if seen.startswith(self._start):
            self._state, self._last = _State.THINKING, b""
            self._think(seen.removeprefix(self._start))
        elif self._start.startswith(seen):
            self._last = seen
        else:
            self._state = _State.OVER

    def _think(self, token: bytes) -> None:
        self._decoder.decode(token)
        seen = self._last + token
        if self._end in seen:
            self._state, self._forced = _State.OVER, []
        self._last = seen[max(0, len(seen) - len(self._end) + 1) :]

    def _force_end(self) -> None:
        """Has the end tag come if the budget is used up, but not within a character."""
        if self._budget is None or not self.is_thinking:
            return
        num_over = self._num_tokens - self._budget
        unfinished, _ = self._decoder.getstate()
        if num_over >= (_MAX_TOKENS_OF_A_CHARACTER if unfinished else 0):
            self._forced = list(self._end_ids)


def _spelling(tokenizer: ByteTokenizer, tag: str) -> tuple[int, ...]:
    """Returns the tag's tokens without those of a blank before it, which some tokenizers add."""
    return min(tokenizer.spellings(tag), key=len)
