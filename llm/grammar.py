"""Structured output: which tokens the answer may go on with, by a grammar that the request asked for.

The library (llguidance) matches bytes, so any tokenizer of the `tokenizers` library works, and a token may span
several terminals. It computes a mask when one is asked for, and so compiles in milliseconds. A mask may take longer
than a step of the model: threads of their own compute each as soon as the token before it is known.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch
from llguidance import LLMatcher

from llm.byte_tokenizer import ByteTokenizer
from llm.grammar_check import NICENESS, GrammarCheck
from llm.grammar_source import GrammarError, check, make_matcher
from llm.structured_output import StructuredOutput
from preprocess.schema import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
# So many answers may have slow masks before others' have to wait for a thread.
_NUM_MASK_THREADS = 4
_BITS_PER_WORD = 32


class GrammarMatcher:
    """How far one answer has come in its grammar. Of one sequence, on one thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        self._words = torch.empty(-(-vocab_size // _BITS_PER_WORD), dtype=torch.int32)
        self._computing = threads.submit(self._compute_mask)
        self.is_complete = False
        """Whether nothing but an end token can follow."""
        self.failure: str | None = None

    @property
    def is_mask_ready(self) -> bool:
        return self._computing.done()

    def mask(self) -> torch.Tensor:
        """Which tokens may come next, (ceil(vocab / 32),), int32, on the CPU: bit i % 32 of word i // 32. Waits for it.

        Once the grammar is complete and cannot go on, these are the model's end tokens. A grammar that turns out to
        be too complex on the way allows no token at all, and `failure` says why.
        """
        try:
            self._computing.result()
        except GrammarError as error:
            self._words.zero_()
            self._fail(error)
        return self._words

    def advance(self, token_id: int) -> bool:
        """Goes on by a token that the mask allowed; false where the grammar fails, and `failure` says why.

        It does where all that may follow is a text that the tokenizer takes for a special token.
        """
        self.mask()  # until then a thread is at work on the matcher
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
        """Returns when the masks of all, or of any, are ready, and after `timeout_s` at the latest."""
        computing = [matcher._computing for matcher in matchers]
        wait(computing, timeout_s) if for_all else wait(computing, timeout_s, FIRST_COMPLETED)


class CompiledGrammar:
    """One compiled grammar, of any number of requests; nothing in it changes."""

    def __init__(self, start: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._start = start
        self._vocab_size = vocab_size
        self._threads = threads

    def new_matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._vocab_size, self._threads)


class GrammarCompiler:
    """Compiles for one model and keeps what was asked for last. May be used by any thread, beside the engine's."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._check = GrammarCheck(tokenizer.arguments)
        self._threads = ThreadPoolExecutor(_NUM_MASK_THREADS, "grammar-mask", initializer=os.nice, initargs=(NICENESS,))
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[tuple[str, str], Future[CompiledGrammar | str]] = OrderedDict()

    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Takes milliseconds for most, about a second for the first, and at most some seconds, see `grammar_check`.

        Raises InvalidRequestError that names the field of `wanted`.
        """
        for text in wanted.choice or ():
            if special := [token for token in self._tokenizer.special_tokens if token in text]:
                reason = f"must be without the model's special tokens, got {special[0]}"
                raise InvalidRequestError(reason, field="choice")
        outcome = self._outcome(*wanted.specification)
        if isinstance(outcome, str):
            raise InvalidRequestError(outcome, field=wanted.specification[0])
        return outcome

    def _outcome(self, field: str, text: str) -> CompiledGrammar | str:
        """The grammar, or why it is refused: found out once for however many ask for it."""
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


def apply_bitmask(logits: torch.Tensor, rows: list[int], matchers: list[GrammarMatcher]) -> None:
    """Sets to -inf, in place, what the grammars of these rows of `logits` (any, vocab) do not allow."""
    words = torch.stack([matcher.mask() for matcher in matchers]).to(logits.device)
    bits = torch.arange(_BITS_PER_WORD, dtype=torch.int32, device=logits.device)
    is_allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~is_allowed, -torch.inf)
