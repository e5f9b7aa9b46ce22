"""The tokens that a request excludes: all but its allowed tokens, and the last token of each bad word."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.params import SamplingParams, check_vocabulary

IntArray = npt.NDArray[np.int64]

NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)


class ExcludedTokens:
    """The excluded tokens of one request, shared by all its answers."""

    def __init__(self, allowed: Sequence[int] | None = None, words: Iterable[tuple[int, ...]] = ()) -> None:
        """`allowed`: the allowed tokens; None: all. `words`: forbidden sequences of tokens."""
        self.allowed: IntArray | None = None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))
        endings: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for word in dict.fromkeys(words):
            endings[word[:-1]].append(word[-1])
        self._endings = {beginning: np.array(ids, dtype=np.int64) for beginning, ids in endings.items()}
        self._lengths = sorted({len(beginning) for beginning in endings})
        self.excludes_some = allowed is not None or bool(endings)
        self.num_deciding = max(self._lengths, default=0)
        """The number of last output tokens that `completing` depends on."""

    @classmethod
    def of(
        cls, params: SamplingParams, tokenizer: ByteTokenizer, vocab_size: int, suppressed: Iterable[int] = ()
    ) -> "ExcludedTokens":
        """Returns the tokens that the parameters exclude, and the model's `suppressed` ones.

        Raises InvalidRequestError for allowed tokens outside the vocabulary of `vocab_size`."""
        allowed = params.allowed_token_ids
        if allowed is not None:
            check_vocabulary("allowed_token_ids", (min(allowed), max(allowed)), vocab_size)
        words = [spelling for word in params.bad_words for spelling in tokenizer.spellings(word)]
        words += [(token_id,) for token_id in suppressed]
        return cls(allowed, (word for word in words if min(word) >= 0 and max(word) < vocab_size))

    def completing(self, last_token_ids: Iterable[int]) -> IntArray:
        """Returns the tokens that would complete one of the words. `last_token_ids`: the end of the output."""
        last = tuple(last_token_ids)
        ends = (last[len(last) - length :] for length in self._lengths if length <= len(last))
        found = [self._endings[end] for end in ends if end in self._endings]
        return np.unique(np.concatenate(found)) if found else NO_TOKENS
