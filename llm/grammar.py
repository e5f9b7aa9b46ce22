"""Structured output: which tokens the answer may go on with, by a grammar that the request asked for.

The library (llguidance) matches bytes, so any tokenizer of the `tokenizers` library works, and a token may span
several terminals. It computes a mask when one is asked for, and so compiles in milliseconds.
"""

import functools
import logging

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from llm.byte_tokenizer import ByteTokenizer
from llm.structured_output import StructuredOutput
from preprocess.schema import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
_MAX_REASON_CHARS = 300

# Bounded, so that a model in doubt does not fill its answer with blanks.
_JSON_WHITESPACE = r"[ \n\r\t]{0,16}"

_BITS_PER_WORD = 32


class GrammarMatcher:
    """How far one answer has come in its grammar. Of one sequence, on one thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.num_words = -(-vocab_size // _BITS_PER_WORD)

    def fill_bitmask(self, words: torch.Tensor) -> None:
        """Writes which tokens may come next: bit i % 32 of `words[i // 32]`; (num_words,), int32, on the CPU.

        Once the grammar is complete and cannot go on, these are the model's end tokens. A grammar that turns out to
        be too complex on the way allows no token at all.
        """
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), self.num_words * words.element_size())
        if self._matcher.is_error():
            logger.warning("a grammar failed on the way: %s", _first_line(self._matcher.get_error()))
            words.zero_()

    def advance(self, token_id: int) -> bool:
        """Goes on by a token that the mask allowed; false where the grammar fails.

        It does where all that may follow is a text that the tokenizer takes for a special token.
        """
        is_matched = self._matcher.consume_token(token_id)
        if not is_matched:
            logger.warning("a grammar failed on the way: %s", _first_line(self._matcher.get_error()))
        return is_matched

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class CompiledGrammar:
    """One compiled grammar, of any number of requests; nothing in it changes."""

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        self._start = start
        self._vocab_size = vocab_size

    def new_matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one model and keeps what was asked for last. May be used by any thread, beside the engine's."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compile = functools.lru_cache(maxsize=MAX_CACHED_GRAMMARS)(self._compile_anew)

    def compile(self, wish: StructuredOutput) -> CompiledGrammar:
        """Takes milliseconds, up to about a second for the first or a very large one.

        Raises InvalidRequestError that names the field of `wish`.
        """
        for text in wish.choice or ():
            if special := [token for token in self._tokenizer.special_tokens if token in text]:
                reason = f"must be without the model's special tokens, got {special[0]}"
                raise InvalidRequestError(reason, field="choice")
        return self._compile(*wish.specification)

    def _compile_anew(self, field: str, text: str) -> CompiledGrammar:
        try:
            matching = self._tokenizer.matching()
        except ValueError as error:
            reason = f"must be absent: {self._tokenizer.name}, the model's tokenizer, does not support it"
            raise InvalidRequestError(reason, field=field) from error
        return compile_grammar(matching, field, text)


def compile_grammar(tokenizer: LLTokenizer, field: str, text: str) -> CompiledGrammar:
    """Compiles one `StructuredOutput.specification`. Depends on its arguments only; any thread may call it.

    Raises InvalidRequestError that names `field`.
    """
    try:
        # Errors go to a client and to logs: without the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _grammar(field, text), log_level=0, limits=limits)
        error = matcher.get_error()
    except ValueError as failure:
        error = str(failure)
    if error:
        raise InvalidRequestError(f"must be one that can be compiled, got: {_first_line(error)}", field=field)
    return CompiledGrammar(matcher, tokenizer.vocab_size)


def _grammar(field: str, text: str) -> str:
    if field in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _JSON_WHITESPACE})
    if field == "regex":
        # As in JavaScript and JSON Schema \d and \w are ASCII, which is what patterns of digits and names mean.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if field == "choice":
        return grammar_from("choice", text)
    return grammar_from("grammar", text)


def _first_line(error: str) -> str:
    return error.strip().split("\n")[0][:_MAX_REASON_CHARS]


def apply_bitmask(logits: torch.Tensor, rows: list[int], matchers: list[GrammarMatcher]) -> None:
    """Sets to -inf, in place, what the grammars of these rows of `logits` (any, vocab) do not allow."""
    words = torch.empty(len(rows), max(matcher.num_words for matcher in matchers), dtype=torch.int32)
    for own_words, matcher in zip(words, matchers, strict=True):
        matcher.fill_bitmask(own_words)
    bits = torch.arange(_BITS_PER_WORD, dtype=torch.int32, device=logits.device)
    is_allowed = (words.to(logits.device)[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~is_allowed, -torch.inf)
