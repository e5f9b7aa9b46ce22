"""The sampling state of a sequence: parameters, past tokens, random numbers and the grammar."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from raylens.cpu_kernels.sampler import RowSettings
from raylens.llm.sampling.excluded_tokens import NO_TOKENS, ExcludedTokens, IntArray
from raylens.llm.sampling.grammar import CompiledGrammar, GrammarMatcher
from raylens.llm.sampling.params import SamplingParams, check_vocabulary
from raylens.llm.sampling.repeated_ngrams import RepeatedNgrams
from raylens.llm.sampling.repetition_detection import RepetitionDetector
from raylens.llm.sampling.thoughts import Thoughts
from raylens.preprocess.schema import InvalidRequestError

FloatArray = npt.NDArray[np.float32]

# At this temperature and below, the softmax is an argmax, and dividing by the temperature could overflow.
_GREEDY_TEMPERATURE = 1e-4

_NOTHING_EXCLUDED = ExcludedTokens()


class SeenTokens:
    """The distinct tokens of a sequence and their counts in its output. Appending a token takes O(1)."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(token_ids))}
        self._token_ids = np.fromiter(self._slots, dtype=np.int64, count=len(self._slots))
        self._output_counts = np.zeros(len(self._slots), dtype=np.float32)

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._token_ids):
            self._token_ids = np.resize(self._token_ids, 2 * slot + 16)
            self._output_counts = np.concatenate([self._output_counts, np.zeros(slot + 16, dtype=np.float32)])
        self._token_ids[slot] = token_id
        self._output_counts[slot] += 1

    @property
    def token_ids(self) -> IntArray:
        return self._token_ids[: len(self._slots)]

    @property
    def output_counts(self) -> FloatArray:
        return self._output_counts[: len(self._slots)]


class SamplerState:
    """The sampling state of one sequence, read by `sampler.choose`. The chosen token is appended when the host reads
    it, before the next choice."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        grammar: CompiledGrammar | None = None,
        excluded: ExcludedTokens = _NOTHING_EXCLUDED,
        index: int = 0,
        thoughts: Thoughts | None = None,
    ) -> None:
        """`vocab_size`: the width of the model's logits. `eos_token_ids`: the model's end tokens. `grammar`: the
        compiled `params.structured_output`. `thoughts`: those before the answer; the grammar holds behind them.
        `excluded`: by `params` and the model. `index`: the number of this answer among the request's `params.n`. Each
        answer has its own stream of random numbers, even with a seed.

        Raises InvalidRequestError with the field, for tokens outside the vocabulary."""
        if (grammar is None) != (params.structured_output is None):
            raise ValueError("a grammar is required exactly if params.structured_output is set")
        check_vocabulary("logit_bias", params.logit_bias, vocab_size)
        check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
        check_vocabulary("logprob_token_ids", params.logprob_token_ids, vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.num_output_tokens = 0
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        matcher = None if grammar is None else grammar.new_matcher()
        self._thoughts = thoughts
        self._matcher_behind = matcher
        self.repetition_penalty = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        counts_prompt = self.repetition_penalty != 1  # the other penalties concern the output only
        # A placeholder's id may lie outside the vocabulary.
        prompt = (token_id for token_id in prompt_token_ids if counts_prompt and 0 <= token_id < vocab_size)
        is_penalized = counts_prompt or params.presence_penalty or params.frequency_penalty
        self.seen = SeenTokens(prompt) if is_penalized else None
        self._excluded = excluded
        self._last_token_ids: deque[int] = deque(maxlen=excluded.num_deciding)
        wanted = params.repetition_detection
        self._detector = None if wanted is None else RepetitionDetector(wanted)
        self.is_repeating = False
        """Whether the answer ends in a repetition that the request wants to be its end."""
        self._ngrams = RepeatedNgrams(params.no_repeat_ngram_size) if params.no_repeat_ngram_size else None
        self.biased_token_ids = np.fromiter(params.logit_bias, dtype=np.int64)
        self.biases = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        stop_token_ids = sorted(token_id for token_id in self.stop_token_ids if token_id < vocab_size)
        self._early_stop_token_ids = np.array(stop_token_ids, dtype=np.int64)
        # Random numbers come from the CPU, so that they depend on neither batch nor device.
        entropy = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=(index,))))
        self.is_greedy = (params.temperature or 0.0) <= _GREEDY_TEMPERATURE
        self._min_tokens = (params.min_tokens or 0) if stop_token_ids else 0
        self.row_settings: RowSettings | None = None
        """Kept by the sampler between tokens."""
        edits = (self.seen is not None, len(self.biases) > 0, excluded.excludes_some, self._ngrams is not None)
        self._always_edits = any(edits)

    @property
    def matcher(self) -> GrammarMatcher | None:
        """Returns what follows the grammar. None: there is none, or it does not hold yet."""
        return None if self._thoughts is not None and self._thoughts.is_thinking else self._matcher_behind

    @property
    def mask(self) -> torch.Tensor | None:
        """Returns the mask of the next tokens that the grammar allows, see `GrammarMatcher.mask`, or None if it allows
        all. The token that begins thoughts is among them."""
        if self.matcher is None:
            return None
        words = self.matcher.mask()
        opening = None if self._thoughts is None else self._thoughts.opening_token_id
        if opening is not None and self.matcher.failure is None:
            words = words.clone()  # it holds behind the thoughts, too
            words.numpy().view(np.uint32)[opening // 32] |= np.uint32(1 << opening % 32)
        return words

    @property
    def allowed_token_ids(self) -> IntArray | None:
        """Returns the allowed next tokens, as far as the grammar allows them, or None if all are."""
        forced = None if self._thoughts is None else self._thoughts.forced_token_ids
        return self._excluded.allowed if forced is None else forced

    @property
    def bad_token_ids(self) -> IntArray:
        """Returns the forbidden next tokens that would complete a bad word or a repeated n-gram."""
        of_words = self._excluded.completing(self._last_token_ids)
        return of_words if self._ngrams is None else np.union1d(of_words, self._ngrams.completing())

    @property
    def banned_token_ids(self) -> IntArray:
        """Returns the forbidden next tokens that would end the output before `min_tokens`."""
        return self._early_stop_token_ids if self.num_output_tokens < self._min_tokens else NO_TOKENS

    @property
    def edits_logits(self) -> bool:
        """Returns whether `plan_edits` may change the next row of logits."""
        if self._thoughts is not None and self._thoughts.forced_token_ids is not None:
            return True
        return self._always_edits or self.matcher is not None or self.num_output_tokens < self._min_tokens

    @property
    def is_complete(self) -> bool:
        """Returns whether the answer's structured output is complete, so that only an end token can follow."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def is_ready(self) -> bool:
        """Returns whether the next token can be chosen without waiting for the grammar's mask."""
        return self.matcher is None or self.matcher.is_mask_ready

    @property
    def failure(self) -> InvalidRequestError | None:
        """Returns the error that ended the answer's structured output, or None."""
        wanted = self.params.structured_output
        if wanted is None or self.matcher is None or self.matcher.failure is None:
            return None
        reason = f"must be one that can be followed to its end, got: {self.matcher.failure}"
        return InvalidRequestError(reason, field=wanted.specification[0])

    def draw_uniform(self) -> float:
        """Returns the sequence's next random number in [0, 1), a multiple of 2**-53. Each drawn token uses one."""
        return self._random.random()

    def append(self, token_id: int) -> bool:
        """Appends the next token of the output. Returns False if the grammar fails after it."""
        self.num_output_tokens += 1
        self._last_token_ids.append(token_id)
        if self._detector is not None:
            self.is_repeating = self._detector.append(token_id)
        if self._ngrams is not None:
            self._ngrams.append(token_id)
        if self.seen is not None:
            self.seen.append(token_id)
        if self._is_of_thoughts(token_id):
            return True
        return self.matcher is None or self.matcher.advance(token_id)

    def _is_of_thoughts(self, token_id: int) -> bool:
        """Takes the next token. Returns whether it belongs to the thoughts, tags included."""
        if self._thoughts is None:
            return False
        was_thinking = self._thoughts.is_thinking
        self._thoughts.append(token_id)
        is_thinking = self._thoughts.is_thinking
        if self._thoughts.is_over:
            self._thoughts = None
        return was_thinking or is_thinking
