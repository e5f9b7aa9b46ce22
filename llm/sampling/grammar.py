"""Structured output: masks of the allowed next tokens of an answer, by its request's grammar.

The library (llguidance) matches bytes, so any tokenizer of the `tokenizers` library works, and a token may span
several terminals. It compiles in milliseconds, because it computes masks on demand. A mask may take longer than a step
of the model, so separate threads start on it once the previous token is known."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.host_values import HostValues
from raylens.llm.sampling.grammar_check import NICENESS, GrammarCheck, GrammarError, check, make_matcher
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
# With so many slow masks at once, the masks of other answers wait for a thread.
_NUM_MASK_THREADS = 4
_BITS_PER_WORD = 32


class GrammarMatcher:
    """Follows one answer through its grammar. It belongs to one sequence. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        self._words = torch.empty(-(-vocab_size // _BITS_PER_WORD), dtype=torch.int32)
        self._computing = threads.submit(self._compute_mask)
        self.is_complete = False
        """Whether only an end token can follow."""
        self.failure: str | None = None

    @property
    def is_mask_ready(self) -> bool:
        return self._computing.done()

    def mask(self) -> torch.Tensor:
        """Waits for the mask of the allowed next tokens and returns it: (ceil(vocab / 32),), int32, on the CPU. Token i
        is bit i % 32 of word i // 32. After a complete grammar the mask allows end tokens only. If the grammar turns
        out to be too complex, the mask allows no token, and `failure` has the reason."""
        try:
            self._computing.result()
        except GrammarError as error:
            self._words.zero_()
            self._fail(error)
        return self._words

    def advance(self, token_id: int) -> bool:
        """Consumes an allowed token. Returns False if the grammar fails, as when only the text of a special token can
        follow; `failure` then has the reason."""
        self.mask()  # until then, another thread may use the matcher
        self._matcher.consume_token(token_id)
        try:
            check(self._matcher)
        except GrammarError as error:
            self._fail(error)
            return False
        self.is_complete = self._matcher.is_stopped()
        self._computing = self._threads.submit(self._compute_mask)
        return True

    def _compute_mask(self) -> None:
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), len(words) * words.element_size())
        check(self._matcher)

    def _fail(self, error: GrammarError) -> None:
        logger.warning("a grammar failed on the way: %s", error)
        self.failure = str(error)

    @staticmethod
    def wait_for(matchers: "Iterable[GrammarMatcher]", timeout_s: float, *, for_all: bool) -> None:
        """Waits until the masks of all matchers, or of any, are ready, but at most `timeout_s`."""
        computing = [matcher._computing for matcher in matchers]
        wait(computing, timeout_s, ALL_COMPLETED if for_all else FIRST_COMPLETED)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """One compiled grammar. Any number of requests may share it."""

    start: LLMatcher
    vocab_size: int
    threads: ThreadPoolExecutor

    def new_matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self.start.deep_copy(), self.vocab_size, self.threads)


class GrammarCompiler:
    """Compiles grammars for one model and caches the most recently used ones. Thread-safe."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._check = GrammarCheck(tokenizer.arguments)
        self._threads = ThreadPoolExecutor(_NUM_MASK_THREADS, "grammar-mask", initializer=os.nice, initargs=(NICENESS,))
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[tuple[str, str], Future[CompiledGrammar | str]] = OrderedDict()

    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Most grammars take milliseconds, the first about a second. `grammar_check` bounds the time to some seconds.
        Raises InvalidRequestError with the field of `wanted`."""
        for text in wanted.choice or ():
            if special := [token for token in self._tokenizer.special_tokens if token in text]:
                reason = f"must be without the model's special tokens, got {special[0]}"
                raise InvalidRequestError(reason, field="choice")
        outcome = self._outcome(*wanted.specification)
        if isinstance(outcome, str):
            raise InvalidRequestError(outcome, field=wanted.specification[0])
        return outcome

    def _outcome(self, field: str, text: str) -> CompiledGrammar | str:
        """Returns the grammar, or the reason for its rejection. Threads with the same grammar share one compilation."""
        with self._lock:
            known = self._outcomes.get((field, text))
            outcome = self._outcomes.setdefault((field, text), Future())
            self._outcomes.move_to_end((field, text))
            if len(self._outcomes) > MAX_CACHED_GRAMMARS:
                self._outcomes.popitem(last=False)
        if known is None:
            try:
                outcome.set_result(self._compile_anew(field, text))
            except BaseException as error:
                with self._lock:
                    self._outcomes.pop((field, text), None)
                outcome.set_exception(error)
        return outcome.result()

    def _compile_anew(self, field: str, text: str) -> CompiledGrammar | str:
        try:
            matching = self._tokenizer.matching()
        except ValueError:
            return f"must be absent: {self._tokenizer.name}, the model's tokenizer, does not support it"
        if reason := self._check.reason_against(field, text):
            return reason
        return CompiledGrammar(make_matcher(matching, field, text), matching.vocab_size, self._threads)


def plan_bitmask(values: HostValues, rows: list[int], row_masks: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Adds the masks of `rows`, see `GrammarMatcher.mask`, to `values`. Returns a function that sets the forbidden
    tokens of logits, (any number, vocab), to -inf in place."""
    masks, index = values.add(np.stack([mask.numpy() for mask in row_masks])), values.add(np.array(rows))

    def apply(logits: torch.Tensor) -> None:
        bits = torch.arange(_BITS_PER_WORD, dtype=torch.int32, device=logits.device)
        is_allowed = (values[masks][:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[values[index]] = logits[values[index]].masked_fill(~is_allowed, -torch.inf)

    return apply
