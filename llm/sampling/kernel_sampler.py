"""Chooses tokens by Raylens' CPU kernels, for all rows in one call. Applies the same settings as `logits_processors`
and `truncation`."""

from collections.abc import Sequence

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.sampler import RowSettings, choose_tokens
from raylens.cpu_kernels.structures import address_of
from raylens.llm.sampling.sampler_state import SamplerState


def choose_by_kernels(library: KernelLibrary, logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int | None]:
    """Returns the next token of each row of `logits`, (len(states), vocab), float32 on the CPU, or None for a row whose
    highest logit is not finite. Overwrites `logits`."""
    kept: list[object] = []  # keeps alive the memory whose addresses the rows hold
    rows = [_settings(state, kept) for state in states]
    return [None if token_id < 0 else token_id for token_id in choose_tokens(library, logits.contiguous(), rows)]


def _settings(state: SamplerState, kept: list[object]) -> RowSettings | None:
    """Returns the settings of a row, or None for an unedited greedy row."""
    edits = state.edits_logits
    if state.is_greedy and not edits:
        return None
    row = state.row_settings
    if row is None:
        row = state.row_settings = _lasting_settings(state)
    row.edits = edits
    if edits:
        _set_edits(row, state, kept)
    if not state.is_greedy:
        row.uniform = state.draw_uniform()
    return row


def _lasting_settings(state: SamplerState) -> RowSettings:
    """Returns a row with the settings that hold for all tokens of an answer."""
    params = state.params
    row = RowSettings(
        repetition_penalty=state.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        temperature=params.temperature or 0.0,
        min_p=params.min_p or 0.0,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        draws=not state.is_greedy,
    )
    if state.allowed_token_ids is not None:
        row.set_tokens("allowed", state.allowed_token_ids)
    if len(state.biases):
        row.set_tokens("biased", state.biased_token_ids)
        row.biases = address_of(state.biases)
    return row


def _set_edits(row: RowSettings, state: SamplerState, kept: list[object]) -> None:
    """Sets the edits that depend on the answer so far."""
    if state.matcher is not None:
        mask = state.matcher.mask()
        kept.append(mask)
        row.mask = mask.data_ptr()
    for name, token_ids in (("bad", state.bad_token_ids), ("early", state.banned_token_ids)):
        kept.append(token_ids)
        row.set_tokens(name, token_ids)
    if state.seen is not None:
        token_ids, counts = state.seen.token_ids, state.seen.output_counts
        kept += (token_ids, counts)
        row.set_tokens("seen", token_ids)
        row.output_counts = address_of(counts)
