"""Edits logits before greedy choice and sampling: grammar, exclusions, `min_tokens`, bias and penalties.

Most edits handle all their rows at once and touch only the affected tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from raylens.llm.host_values import HostValues
from raylens.llm.sampling.excluded_tokens import IntArray
from raylens.llm.sampling.grammar import plan_bitmask
from raylens.llm.sampling.sampler_state import SamplerState, SeenTokens
from raylens.llm.sampling.truncation import Edit

TokensOfRows = list[tuple[int, IntArray]]
"""Row numbers of the logits, each with some tokens of the row."""
Places = tuple[int, int]
"""Distinct places in the logits, as indexes into the HostValues: of their rows and of their columns."""


def plan_edits(values: HostValues, states: Sequence[SamplerState]) -> list[Edit]:
    """Adds the settings of each row to `values`. Returns the edits of logits, (len(states), vocab), to apply in order
    once the values are on the device. The edits and their order are vLLM's:

    1. structured output: every token that the grammar forbids gets -inf
    2. `allowed_token_ids`, or the next token of an end tag that has to come: every other token gets -inf
    3. `bad_words`: the last token of a word gets -inf if the output ends in the word's other tokens. The same holds for
       n-grams of the output with `no_repeat_ngram_size`. Skipped for a row that would lose all its tokens
    4. `min_tokens`: the tokens that would end the output get -inf. Skipped for a row that would lose all its tokens, as
       with a complete grammar: the form of the answer takes precedence over its length
    5. `logit_bias`: is added
    6. `repetition_penalty`, for tokens of prompt and output: multiplies a negative logit, divides any other, like
       transformers' RepetitionPenaltyLogitsProcessor
    7. `frequency_penalty` times the token's count in the output, and `presence_penalty` once for a token of the output:
       are subtracted, as OpenAI defines it"""
    rows = [(row, state) for row, state in enumerate(states) if state.edits_logits]
    edits: list[Edit] = []
    if constrained := [(row, mask) for row, state in rows if (mask := state.mask) is not None]:
        edits.append(plan_bitmask(values, [row for row, _ in constrained], [mask for _, mask in constrained]))
    for row, state in rows:
        if (allowed := state.allowed_token_ids) is not None:
            edits.append(_keep(values, row, allowed))
    if bad := [(row, token_ids) for row, state in rows if len(token_ids := state.bad_token_ids)]:
        edits.append(_ban(values, bad))
    if early := [(row, token_ids) for row, state in rows if len(token_ids := state.banned_token_ids)]:
        edits.append(_ban(values, early))
    if biased := [(row, state) for row, state in rows if len(state.biases)]:
        edits.append(_bias(values, biased))
    if penalized := [(row, state, seen) for row, state in rows if (seen := state.seen) and len(seen.token_ids)]:
        edits.append(_penalize(values, penalized))
    return edits


def _keep(values: HostValues, row: int, token_ids: IntArray) -> Edit:
    columns = values.add(token_ids)

    def keep(logits: torch.Tensor) -> None:
        own, kept = logits[row], values[columns]
        allowed = own[kept]
        own.fill_(-torch.inf)
        own[kept] = allowed

    return keep


def _ban(values: HostValues, banned: TokensOfRows) -> Edit:
    """Sets each row's tokens to -inf, unless the row would lose all its tokens."""
    row_of_each, columns = _places(values, banned)

    def ban(logits: torch.Tensor) -> None:
        places = values[row_of_each], values[columns]
        allowed = logits[places]
        logits.index_put_(places, logits.new_full((), -torch.inf))
        is_emptied = logits.amax(dim=-1) == -torch.inf
        logits[places] = torch.where(is_emptied[places[0]], allowed, -torch.inf)

    return ban


def _bias(values: HostValues, rows: list[tuple[int, SamplerState]]) -> Edit:
    row_of_each, columns = _places(values, [(row, state.biased_token_ids) for row, state in rows])
    biases = values.add(np.concatenate([state.biases for _, state in rows]))

    def bias(logits: torch.Tensor) -> None:
        logits[values[row_of_each], values[columns]] += values[biases]

    return bias


def _penalize(values: HostValues, rows: list[tuple[int, SamplerState, SeenTokens]]) -> Edit:
    row_of_each, columns = _places(values, [(row, seen.token_ids) for row, _, seen in rows])
    settings = [
        (state.repetition_penalty, state.params.frequency_penalty, state.params.presence_penalty)
        for _, state, _ in rows
    ]
    repeats = [len(seen.token_ids) for _, _, seen in rows]
    penalties = values.add(np.repeat(np.array(settings, dtype=np.float32).T, repeats, axis=1))
    output_counts = values.add(np.concatenate([seen.output_counts for _, _, seen in rows]))

    def penalize(logits: torch.Tensor) -> None:
        places, counts = (values[row_of_each], values[columns]), values[output_counts]
        repetition, frequency, presence = values[penalties]
        own = logits[places]
        own = torch.where(own < 0, own * repetition, own / repetition)
        own -= frequency * counts
        own -= presence * (counts > 0)
        logits[places] = own

    return penalize


def _places(values: HostValues, tokens: TokensOfRows) -> Places:
    row_of_each = np.repeat([row for row, _ in tokens], [len(token_ids) for _, token_ids in tokens])
    return values.add(row_of_each), values.add(np.concatenate([token_ids for _, token_ids in tokens]))
