"""The sampling parameters of one request."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Interval

from raylens.llm.sampling import bounds
from raylens.llm.sampling.repetition_detection import RepetitionDetection
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. For `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and
    `min_tokens` None stands for the model's own default (`generation_defaults`). All others are off unless set.

    - `max_tokens`: None runs to the end of the context, 0 computes the prompt only
    - `min_tokens`: below this length no end token, no token of `stop_token_ids` and no stop string ends the output
    - `temperature`: 0 is greedy
    - `top_k` (0 and -1 are off), `top_p` (1 is off), `min_p` (0 is off): see `truncation.plan_truncation`
    - `repetition_penalty` (1 is off), on tokens of prompt and output; `presence_penalty`, `frequency_penalty` (0 is
      off), on tokens of the output only; `logit_bias`, by token id: see `logits_processors.plan_edits`
    - `allowed_token_ids`: the output has no other tokens; `bad_words`: the output has none of these texts, at least not
      in their usual tokens: see `logits_processors.plan_edits`
    - `no_repeat_ngram_size`: no run of so many tokens of the output comes twice; 0 is off
    - `repetition_detection`: what repetition ends the output, which then counts as cut off
    - `seed`: makes the tokens reproducible, in any batch
    - `stop`: texts that end the output and are not part of it; `stop_token_ids`: further end tokens;
      `include_stop_str_in_output`: the output includes the stop string
    - `skip_special_tokens`: the output's text has no special tokens
    - `ignore_eos`: the model's end tokens do not end the output
    - `logprobs`, `prompt_logprobs`: the number of likeliest tokens to name at each position of output and prompt,
      besides the token at that position; None: no log-probabilities. `logprob_token_ids`: the tokens to name at each
      position of the output in place of the likeliest
    - `thinking_token_budget`: after so many tokens of thoughts their end tag follows. Without effect on a model
      without thoughts
    - `n`: the number of answers to the prompt
    - `structured_output`: the form of the answer

    Raises InvalidRequestError with the field, its limit and its value."""

    n: Annotated[int, bounds.NUM_ANSWERS] = 1
    max_tokens: Annotated[int, bounds.NUM_TOKENS] | None = None
    min_tokens: Annotated[int, bounds.NUM_TOKENS] | None = None
    temperature: Annotated[float, bounds.TEMPERATURE] | None = None
    top_p: Annotated[float, bounds.TOP_P] | None = None
    top_k: Annotated[int, bounds.TOP_K] | None = None
    min_p: Annotated[float, bounds.MIN_P] | None = None
    repetition_penalty: Annotated[float, bounds.REPETITION_PENALTY] | None = None
    presence_penalty: Annotated[float, bounds.PENALTY] = 0.0
    frequency_penalty: Annotated[float, bounds.PENALTY] = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: Annotated[int, bounds.NGRAM_SIZE] = 0
    repetition_detection: RepetitionDetection | None = None
    seed: Annotated[int, bounds.SEED] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    thinking_token_budget: Annotated[int, bounds.NUM_TOKENS] | None = None
    logprobs: Annotated[int, bounds.NUM_LOGPROBS] | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Annotated[int, bounds.NUM_LOGPROBS] | None = None
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        for name, interval in _INTERVALS.items():
            if (value := getattr(self, name)) is not None:
                _check_interval(name, value, interval)
        for bias in self.logit_bias.values():
            _check_interval("logit_bias", bias, bounds.LOGIT_BIAS)
        for name, most, unit in _MAX_COUNTS:
            count = len(getattr(self, name))
            _check(count <= most, name, f"at most {most} {unit}", count)
        for word in self.bad_words:
            limit = f"texts of 1 to {bounds.MAX_BAD_WORD_CHARS} characters, not all blank"
            _check(word.strip() != "" and len(word) <= bounds.MAX_BAD_WORD_CHARS, "bad_words", limit, len(word))
        for text in self.stop:
            limit = f"strings of 1 to {bounds.MAX_STOP_CHARS} characters"
            _check(0 < len(text) <= bounds.MAX_STOP_CHARS, "stop", limit, len(text))
        if self.max_tokens is not None and self.min_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens", self.min_tokens)
        if self.allowed_token_ids is not None:
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", "of at least one token", 0)
            # The grammar may reach a state that allows none of these tokens.
            is_free = self.structured_output is None
            _check(is_free, "allowed_token_ids", "absent where structured_output is set", len(self.allowed_token_ids))
        # After a complete structured output, only an end token may follow.
        is_endless = self.ignore_eos and self.structured_output is not None
        _check(not is_endless, "ignore_eos", "false where structured_output is set", self.ignore_eos)


_INTERVALS: dict[str, Interval] = {
    name: metadata
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for part in (hint, *get_args(hint))
    for metadata in getattr(part, "__metadata__", ())
}
_MAX_COUNTS = (
    ("logit_bias", bounds.MAX_BIASED_TOKENS, "tokens"),
    ("bad_words", bounds.MAX_BAD_WORDS, "texts"),
    ("stop", bounds.MAX_STOP_STRINGS, "strings"),
    ("stop_token_ids", bounds.MAX_STOP_TOKEN_IDS, "tokens"),
    ("logprob_token_ids", bounds.MAX_LOGPROB_TOKEN_IDS, "tokens"),
)


def check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequestError with `field` unless all tokens are in the vocabulary of `vocab_size`."""
    for token_id in token_ids:
        _check(0 <= token_id < vocab_size, field, f"of token ids between 0 and {vocab_size - 1}", token_id)


def _check_interval(field: str, value: float, allowed: Interval) -> None:
    sides: list[tuple[str, Any, Callable[[Any, Any], bool]]] = [
        ("at least", allowed.ge, operator.ge),
        ("above", allowed.gt, operator.gt),
        ("at most", allowed.le, operator.le),
    ]
    closed = [side for side in sides if side[1] is not None]
    holds = all(compare(value, bound) for _, bound, compare in closed)
    _check(holds, field, " and ".join(f"{words} {bound}" for words, bound, _ in closed), value)


def _check(holds: bool, field: str, limit: str, value: object) -> None:
    if not holds:
        raise InvalidRequestError(f"must be {limit}, got {value}", field=field)
