"""Guesses an answer's next tokens: the tokens that followed the same n-gram earlier in its prompt or text.

Prompt lookup decoding (Saxena, 2023), vLLM's `ngram` speculation. One step computes a token and the guesses after it. A
guess is accepted if the sampler then chooses the same token, so answers do not change."""

_NGRAM = 3
"""The number of matching tokens. With fewer, most guesses would be wrong."""
_MAX_LENGTH = 7
_MAX_PAUSE = 64
_MAX_INDEXED = 4096
"""The most tokens indexed by one guess, so that no step waits for a long prompt."""


class PromptLookup:
    """The guesses for one sequence. Right guesses make the next ones longer; wrong guesses make them rarer."""

    def __init__(self, token_ids: list[int], vocab_size: int) -> None:
        """`token_ids`: the sequence's own, growing list. Tokens outside the vocabulary are never guessed."""
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._next_position: dict[tuple[int, ...], int] = {}
        self._num_indexed = _NGRAM
        self._length = 2
        self._pause, self._resumes_at = 0, 0

    def guess(self, max_tokens: int) -> list[int]:
        """Returns up to `max_tokens` guessed tokens, or none."""
        token_ids = self._token_ids
        end = len(token_ids)
        indexed_end = min(end, self._num_indexed + _MAX_INDEXED)
        for position in range(self._num_indexed, indexed_end):
            self._next_position[tuple(token_ids[position - _NGRAM : position])] = position
        self._num_indexed = max(indexed_end, _NGRAM)
        found = self._next_position.get(tuple(token_ids[-_NGRAM:]))
        if found is None or end < self._resumes_at:
            return []
        guessed: list[int] = []
        for position in range(found, found + min(max_tokens, self._length)):
            # A text that repeats itself is expected to continue so.
            token_id = token_ids[position] if position < end else guessed[position - end]
            if not 0 <= token_id < self._vocab_size:
                break
            guessed.append(token_id)
        return guessed

    def learn(self, num_guessed: int, num_right: int) -> None:
        """Adapts the length of the next guess to the number of right tokens in the last one."""
        if num_right == num_guessed:
            self._length, self._pause = min(2 * self._length, _MAX_LENGTH), 0
        else:
            self._length = max(1, num_right)
        if num_right == 0:
            self._pause = min(2 * self._pause + 1, _MAX_PAUSE)
            self._resumes_at = len(self._token_ids) + self._pause
