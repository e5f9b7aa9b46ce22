"""Changes logits before a token is chosen, greedily or not: grammar, exclusions, `min_tokens`, bias and penalties.

Most processors work on all rows that need them at once, and touch only the tokens that they are about.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from llm.excluded_tokens import IntArray
from llm.grammar import apply_bitmask
from llm.sampler_state import FloatArray, SamplerState

Rows = list[tuple[int, SamplerState]]
"""Row numbers of the logits, each with the row's state."""


def process_logits(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Changes `logits` (len(states), vocab), float32, in place, by each row's settings, in vLLM's order:

    1. structured output: every token that the grammar does not allow gets -inf
    2. `allowed_token_ids`: every other token gets -inf
    3. `bad_words`: the last token of a word gets -inf where the output ends in the tokens before it. This is skipped
       for a row in which no other token would be left
    4. `min_tokens`: the tokens that would end the output get -inf. This is skipped for a row in which no other token
       would be left, as when the grammar is complete: the form of the answer takes precedence over its length
    5. `logit_bias`: is added
    6. `repetition_penalty`: multiplies a negative logit of a token of prompt or output, and divides any other, like
       transformers' RepetitionPenaltyLogitsProcessor
    7. `frequency_penalty` times the token's count in the output, and `presence_penalty` once for a token of the output:
       are subtracted, as OpenAI defines it
    """
    rows = [(row, state) for row, state in enumerate(states) if state.edits_logits]
    if constrained := [(row, state.matcher) for row, state in rows if state.matcher is not None]:
        apply_bitmask(logits, [row for row, _ in constrained], [matcher for _, matcher in constrained])
    for row, state in rows:
        if state.allowed_token_ids is not None:
            _keep(logits[row], state.allowed_token_ids)
    if bad := [(row, state) for row, state in rows if len(state.bad_token_ids)]:
        _ban(logits, bad, lambda state: state.bad_token_ids)
    if early := [(row, state) for row, state in rows if len(state.banned_token_ids)]:
        _ban(logits, early, lambda state: state.banned_token_ids)
    if biased := [(row, state) for row, state in rows if len(state.biases)]:
        places = _places(logits, biased, lambda state: state.biased_token_ids)
        logits[places] += _to_device(logits, [state.biases for _, state in biased])
    if penalized := [(row, state) for row, state in rows if state.seen is not None and len(state.seen.token_ids)]:
        _penalize(logits, penalized)


def _keep(row: torch.Tensor, token_ids: IntArray) -> None:
    places = _to_device(row, [token_ids])
    allowed = row[places]
    row.fill_(-torch.inf)
    row[places] = allowed


def _ban(logits: torch.Tensor, rows: Rows, token_ids: Callable[[SamplerState], IntArray]) -> None:
    """Sets each row's `token_ids` to -inf, but leaves a row unchanged in which no other token would be left."""
    places = _places(logits, rows, token_ids)
    allowed = logits[places]
    logits[places] = -torch.inf
    is_emptied = logits.amax(dim=-1) == -torch.inf
    logits[places] = torch.where(is_emptied[places[0]], allowed, -torch.inf)


def _penalize(logits: torch.Tensor, rows: Rows) -> None:
    places = _places(logits, rows, lambda state: _seen(state)[0])
    counts = _to_device(logits, [_seen(state)[1] for _, state in rows])

    def per_token(setting: Callable[[SamplerState], float]) -> torch.Tensor:
        own = [np.full(len(_seen(state)[0]), setting(state), dtype=np.float32) for _, state in rows]
        return _to_device(logits, own)

    repetition = per_token(lambda state: state.repetition_penalty)
    values = logits[places]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= per_token(lambda state: state.params.frequency_penalty) * counts
    values -= per_token(lambda state: state.params.presence_penalty) * (counts > 0)
    logits[places] = values


def _seen(state: SamplerState) -> tuple[IntArray, FloatArray]:
    assert state.seen is not None, "rows without penalties are left out"
    return state.seen.token_ids, state.seen.output_counts


def _places(
    logits: torch.Tensor, rows: Rows, token_ids: Callable[[SamplerState], IntArray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the row and the column of each of the rows' tokens, as an index into `logits` that names no place
    twice."""
    columns = [token_ids(state) for _, state in rows]
    row_of_each = np.repeat([row for row, _ in rows], [len(own) for own in columns])
    return _to_device(logits, [row_of_each]), _to_device(logits, columns)


def _to_device(logits: torch.Tensor, arrays: Sequence[IntArray | FloatArray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(logits.device)
