"""Turns logits into token ids, each row of a batch by its own sampling parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cpu_kernels.library import kernel_library
from llm.host_values import HostValues
from llm.kernel_sampler import choose_by_kernels
from llm.logits_processors import plan_edits
from llm.logprobs import TokenLogprobs, token_logprobs
from llm.sampler_state import SamplerState
from llm.truncation import plan_truncation

_TOKENS_PER_GROUP = 128


@dataclass(slots=True)  # not frozen: to freeze it would cost a microsecond for each token
class SampledToken:
    """The token chosen for one row, with its `logprobs` where the row's parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | None]:
    """Chooses one token for each row of `logits` (len(states), vocab), float32, and appends it to the row's state.

    Settings apply in vLLM's order: log-probabilities of the raw logits, then `plan_edits`. Then a greedy row takes its
    likeliest token. For any other row the temperature, `plan_truncation` and a draw follow.

    Returns None for a row whose highest logit is NaN or infinite, and for a row whose grammar fails: such a failure
    concerns the row's sequence alone. May overwrite `logits`.
    """
    if not states:
        return []
    wanting = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    raw = logits[wanting] if wanting else logits
    library = kernel_library() if logits.device.type == "cpu" else None
    token_ids = _choose(logits, states) if library is None else choose_by_kernels(library, logits, states)
    sampled = [
        None if token_id is None or not state.append(token_id) else SampledToken(token_id)
        for state, token_id in zip(states, token_ids, strict=True)
    ]
    if wanting:
        wanted = token_logprobs(
            raw, [token_ids[row] or 0 for row in wanting], [_num_top(states[row]) for row in wanting]
        )
        for row, logprobs in zip(wanting, wanted, strict=True):
            if (token := sampled[row]) is not None:
                token.logprobs = logprobs
    return sampled


def _choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int | None]:
    """Returns each row's next token, or None for a row whose highest logit is not finite, before its settings or behind
    them. The host sends one array to the device, and waits for one."""
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
    told = zip(*torch.stack([token_ids, is_finite.long()]).tolist(), strict=True)
    return [token_id if is_finite else None for token_id, is_finite in told]


def _num_top(state: SamplerState) -> int:
    return state.params.logprobs or 0


def _plan_draw(
    values: HostValues, rows: list[int], states: Sequence[SamplerState]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Returns what draws from the truncated softmax(logits / temperature) of each of the `rows`, and puts what it draws
    into the token ids of all rows."""
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
    """Returns the token of each row at which the cumulative sum of the row's `weights` (rows, vocab) passes the share
    `uniforms` (rows,), float64, of their sum.

    One float64 decides for each row. Rounding may change with the batch, but it moves the bounds between tokens by
    1e-16 or so, which hardly ever changes a token. The search first finds a group of tokens and then the token inside
    the group, because a cumulative sum costs much more than a sum.
    """
    padding = -weights.shape[1] % _TOKENS_PER_GROUP
    groups = torch.nn.functional.pad(weights, (0, padding)).view(len(weights), -1, _TOKENS_PER_GROUP)
    cumulative = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = (uniforms[:, None] * cumulative[:, -1:]).contiguous()
    # Where a row has no finite logit, nothing is drawn, but no index may leave its bounds.
    group = torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[1] - 1)
    rest = targets - cumulative.gather(1, (group - 1).clamp_(min=0)).masked_fill_(group == 0, 0.0)
    inside = groups[torch.arange(len(groups), device=groups.device), group[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # The two sums of a group may differ in their last bits. The bound keeps the token within the group.
    rest = torch.minimum(rest, torch.nextafter(inside[:, -1:], torch.zeros_like(rest)))
    token_ids = group * _TOKENS_PER_GROUP + torch.searchsorted(inside, rest, right=True)
    return token_ids[:, 0].clamp_(max=weights.shape[1] - 1)
