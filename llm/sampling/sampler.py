"""Turns logits into token ids. Each row of a batch has its own sampling parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylens.cpu_kernels.library import kernel_library
from raylens.cpu_kernels.sampler import RowSettings, choose_tokens
from raylens.cpu_kernels.structures import address_of
from raylens.llm.host_values import HostCopy, HostValues, send
from raylens.llm.sampling.logits_processors import plan_edits
from raylens.llm.sampling.logprobs import LogprobsCopy, TokenLogprobs
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sampling.truncation import plan_truncation

_TOKENS_PER_GROUP = 128


@dataclass(slots=True)  # not frozen: freezing would cost a microsecond for each token
class SampledToken:
    """The token chosen for one row, with its `logprobs` if the row's parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """The token chosen for each row.

    `token_ids`: returns them, (num_rows,), int64, on the logits' device, with any id for a row without a token. `read`:
    on the host, with None for a row whose highest logit is not finite, before or after its edits."""

    token_ids: Callable[[], torch.Tensor]
    read: Callable[[], list[int | None]]


@dataclass(slots=True)
class ChosenTokens:
    """The next token of each row, chosen on the device. The next step can use `token_ids` before the host knows them.
    Call `read` once. `logprobs`: of the rows that ask for them, in order."""

    states: Sequence[SamplerState]
    choice: _Choice
    logprobs: LogprobsCopy | None

    @property
    def token_ids(self) -> torch.Tensor:
        return self.choice.token_ids()

    def read(self) -> list[SampledToken | None]:
        """Waits for the tokens, appends each to its row's state, and returns them, with None for a row whose highest
        logit is NaN or infinite and for a row whose grammar fails. Such a failure ends that row's request only."""
        sampled = [
            None if token_id is None or not state.append(token_id) else SampledToken(token_id)
            for state, token_id in zip(self.states, self.choice.read(), strict=True)
        ]
        if self.logprobs is not None:
            for row, logprobs in zip(_wanting_logprobs(self.states), self.logprobs.read(), strict=True):
                if (token := sampled[row]) is not None:
                    token.logprobs = logprobs
        return sampled


def choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> ChosenTokens:
    """Launches the choice of one token for each row of `logits` (len(states), vocab), float32.

    Settings apply in vLLM's order: log-probabilities of the raw logits, then `plan_edits`. A greedy row then takes its
    likeliest token. For other rows the temperature, `plan_truncation` and a draw follow. May overwrite `logits`. The
    host waits for the device only for rows with `waits_for_device`."""
    wanting = _wanting_logprobs(states)
    if not wanting:
        return ChosenTokens(states, _choose(logits, states), None)
    rows = send(np.array(wanting), logits.device)
    raw, choice = logits[rows], _choose(logits, states)
    params = [states[row].params for row in wanting]
    num_top, others = [one.logprobs or 0 for one in params], [one.logprob_token_ids for one in params]
    return ChosenTokens(states, choice, LogprobsCopy(raw, choice.token_ids()[rows], num_top, others))


def _wanting_logprobs(states: Sequence[SamplerState]) -> list[int]:
    return [row for row, state in enumerate(states) if state.params.logprobs is not None]


def _choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> _Choice:
    library = kernel_library() if logits.device.type == "cpu" else None
    if library is None:
        return _choose_by_torch(logits, states)
    kept: list[object] = []  # keeps alive the memory whose addresses the rows hold
    rows = [_kernel_settings(state, kept) for state in states]
    chosen = choose_tokens(library, logits.contiguous(), rows)
    tokens = [None if token_id < 0 else token_id for token_id in chosen]
    return _Choice(lambda: torch.tensor([token_id or 0 for token_id in tokens]), lambda: tokens)


def _kernel_settings(state: SamplerState, kept: list[object]) -> RowSettings | None:
    """Returns a row's settings for the kernels, which `logits_processors` and `truncation` describe, or None for an
    unedited greedy row."""
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
    if len(state.biases):
        row.set_tokens("biased", state.biased_token_ids)
        row.biases = address_of(state.biases)
    return row


def _set_edits(row: RowSettings, state: SamplerState, kept: list[object]) -> None:
    """Sets the edits that depend on the answer so far."""
    mask, allowed = state.mask, state.allowed_token_ids
    kept += (mask, allowed)
    row.mask = None if mask is None else mask.data_ptr()
    row.set_tokens("allowed", allowed)
    for name, token_ids in (("bad", state.bad_token_ids), ("early", state.banned_token_ids)):
        kept.append(token_ids)
        row.set_tokens(name, token_ids)
    if state.seen is not None:
        token_ids, counts = state.seen.token_ids, state.seen.output_counts
        kept += (token_ids, counts)
        row.set_tokens("seen", token_ids)
        row.output_counts = address_of(counts)


def _choose_by_torch(logits: torch.Tensor, states: Sequence[SamplerState]) -> _Choice:
    """Chooses on the logits' device, with one copy in each direction."""
    values = HostValues(logits.device)
    edits = plan_edits(values, states)
    drawing = [row for row, state in enumerate(states) if not state.is_greedy]
    draw = _plan_draw(values, drawing, [states[row] for row in drawing]) if drawing else None
    values.upload()
    is_finite = logits.amax(dim=-1).isfinite()  # a NaN counts as the highest
    for edit in edits:
        edit(logits)
    highest, token_ids = logits.max(dim=-1)
    is_finite &= highest.isfinite()
    if draw is not None:
        draw(logits, token_ids)
    copy = HostCopy(torch.stack([token_ids, is_finite.long()]))

    def read() -> list[int | None]:
        return [token_id if has_token else None for token_id, has_token in zip(*copy.read(), strict=True)]

    return _Choice(lambda: token_ids, read)


def _plan_draw(
    values: HostValues, rows: list[int], states: Sequence[SamplerState]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Returns a function that draws a token for each of the `rows` and writes it to the token ids of all rows."""
    index = values.add(np.array(rows))
    own_temperatures = [state.params.temperature or 0.0 for state in states]
    temperatures = values.add(np.array(own_temperatures, dtype=np.float32)[:, None])
    uniforms = values.add(np.array([state.draw_uniform() for state in states]))
    cuts = plan_truncation(values, states)

    def draw(all_logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        logits = all_logits[values[index]]
        logits /= values[temperatures]
        logits -= logits.amax(dim=-1, keepdim=True)
        for cut in cuts:
            cut(logits)
        token_ids[values[index]] = _invert_cdf(logits.exp_(), values[uniforms])

    return draw


def _invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns the first token of each row at which the cumulative sum of the row's `weights` (rows, vocab) exceeds the
    share `uniforms` (rows,), float64, of their sum.

    Rounding may differ between batches, by about 1e-16, which hardly ever changes a token. The search finds a group of
    tokens first and then the token within, because a cumulative sum costs much more than a sum."""
    padding = -weights.shape[1] % _TOKENS_PER_GROUP
    groups = torch.nn.functional.pad(weights, (0, padding)).view(len(weights), -1, _TOKENS_PER_GROUP)
    cumulative = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = (uniforms[:, None] * cumulative[:, -1:]).contiguous()
    # A row without a finite logit has no valid draw, but its index must stay within bounds.
    group = torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[1] - 1)
    rest = targets - cumulative.gather(1, (group - 1).clamp_(min=0)).masked_fill_(group == 0, 0.0)
    inside = groups[torch.arange(len(groups), device=groups.device), group[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # The two sums of a group may differ in their last bits. The bound keeps the token within the group.
    rest = torch.minimum(rest, torch.nextafter(inside[:, -1:], torch.zeros_like(rest)))
    token_ids = group * _TOKENS_PER_GROUP + torch.searchsorted(inside, rest, right=True)
    return token_ids[:, 0].clamp_(max=weights.shape[1] - 1)
