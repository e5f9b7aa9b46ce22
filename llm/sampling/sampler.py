"""Turns logits into token ids. Each row of a batch has its own sampling parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylens.cpu_kernels.library import kernel_library
from raylens.llm.host_values import HostCopy, HostValues, send
from raylens.llm.sampling.kernel_sampler import choose_by_kernels
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

    `token_ids`: returns them, (num_rows,), int64, on the logits' device, with any id for a row without a token.
    `read`: returns them on the host, with None for a row whose highest logit is not finite, before or after its
    edits."""

    token_ids: Callable[[], torch.Tensor]
    read: Callable[[], list[int | None]]


class ChosenTokens:
    """The next token of each row, chosen on the device. The next step can use `token_ids` before the host knows them.
    Call `read` once."""

    def __init__(self, states: Sequence[SamplerState], choice: _Choice, logprobs: LogprobsCopy | None) -> None:
        """`logprobs`: of the rows that ask for them, in order."""
        self._states = states
        self._choice = choice
        self._logprobs = logprobs

    @property
    def token_ids(self) -> torch.Tensor:
        return self._choice.token_ids()

    def read(self) -> list[SampledToken | None]:
        """Waits for the tokens, appends each to its row's state, and returns them.

        Returns None for a row whose highest logit is NaN or infinite, and for a row whose grammar fails. Such a failure
        ends that row's request only."""
        sampled = [
            None if token_id is None or not state.append(token_id) else SampledToken(token_id)
            for state, token_id in zip(self._states, self._choice.read(), strict=True)
        ]
        if self._logprobs is not None:
            for row, logprobs in zip(_wanting_logprobs(self._states), self._logprobs.read(), strict=True):
                if (token := sampled[row]) is not None:
                    token.logprobs = logprobs
        return sampled


def choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> ChosenTokens:
    """Launches the choice of one token for each row of `logits` (len(states), vocab), float32.

    Settings apply in vLLM's order: log-probabilities of the raw logits, then `plan_edits`. A greedy row then takes its
    likeliest token. For other rows the temperature, `plan_truncation` and a draw follow. May overwrite `logits`.

    The host waits for the device only for rows with `waits_for_device`.
    """
    wanting = _wanting_logprobs(states)
    if not wanting:
        return ChosenTokens(states, _choose(logits, states), None)
    rows = send(np.array(wanting), logits.device)
    raw, choice = logits[rows], _choose(logits, states)
    num_top = [states[row].params.logprobs or 0 for row in wanting]
    return ChosenTokens(states, choice, LogprobsCopy(raw, choice.token_ids()[rows], num_top))


def _wanting_logprobs(states: Sequence[SamplerState]) -> list[int]:
    return [row for row, state in enumerate(states) if state.params.logprobs is not None]


def _choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> _Choice:
    library = kernel_library() if logits.device.type == "cpu" else None
    if library is None:
        return _choose_by_torch(logits, states)
    tokens = choose_by_kernels(library, logits, states)
    return _Choice(lambda: torch.tensor([token_id or 0 for token_id in tokens]), lambda: tokens)


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
    """Returns a function that draws from the truncated softmax(logits / temperature) of each of the `rows`, and writes
    the result to the token ids of all rows."""
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

    Rounding may differ between batches. It moves the bounds between tokens by about 1e-16, which hardly ever changes a
    token. The search finds a group of tokens first and then the token within, because a cumulative sum costs much more
    than a sum.
    """
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
