"""What changes logits before a token is chosen, greedily or not: grammar, exclusions, `min_tokens`, bias, penalties.

Each works on all rows that want it at once, and touches only the tokens that it is about.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from llm.excluded_tokens import IntArray
from llm.grammar import apply_bitmask
from llm.sampler_state import FloatArray, SamplerState

Rows = list[tuple[int, SamplerState]]
"""Rows of the logits with their states."""


def process_logits(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Changes `logits` (len(states), vocab), float32, in place, by each row's settings, in vLLM's order:

    1. structured output: -inf for every token that the grammar does not allow
    2. `allowed_token_ids`: -inf for every other token
    3. `bad_words`: -inf for the last of a word's tokens where the output ends in those before it. Gives way where no
       other token is left
    4. `min_tokens`: -inf for the tokens that would end the output. Gives way where no other token is left, as when the
       grammar is complete: the form of the answer goes before its length
    5. `logit_bias`: added
    6. `repetition_penalty`, on tokens of prompt and output: a negative logit is multiplied by it, another divided, as
       by transformers' RepetitionPenaltyLogitsProcessor
    7. `frequency_penalty` times the count in the output, and `presence_penalty` once, subtracted, as OpenAI defines
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
    """Bans each row's `token_ids`, where others are left."""
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
    """Row and column of each of the rows' tokens, one after another: an index into `logits`, no place in it twice."""
    columns = [token_ids(state) for _, state in rows]
    row_of_each = np.repeat([row for row, _ in rows], [len(own) for own in columns])
    return _to_device(logits, [row_of_each]), _to_device(logits, columns)


def _to_device(logits: torch.Tensor, arrays: Sequence[IntArray | FloatArray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(logits.device)
