"""The tokens that would repeat a run of tokens of the answer."""

from collections import defaultdict, deque

import numpy as np

from raylens.llm.sampling.excluded_tokens import NO_TOKENS, IntArray


class RepeatedNgrams:
    """The n-grams, runs of `size` tokens, of one answer. Unlike transformers' NoRepeatNGramLogitsProcessor, it does not
    count the prompt's, which many documents and pictures repeat."""

    def __init__(self, size: int) -> None:
        self._last: deque[int] = deque(maxlen=size - 1)
        # By hash, because the runs themselves could take gigabytes.
        self._next: defaultdict[int, list[int]] = defaultdict(list)

    def append(self, token_id: int) -> None:
        if len(self._last) == self._last.maxlen:
            self._next[hash(tuple(self._last))].append(token_id)
        self._last.append(token_id)

    def completing(self) -> IntArray:
        """Returns the distinct tokens that would end an n-gram that the answer already has."""
        if len(self._last) < (self._last.maxlen or 0):
            return NO_TOKENS
        found = self._next.get(hash(tuple(self._last)))
        return NO_TOKENS if found is None else np.unique(np.array(found, dtype=np.int64))
