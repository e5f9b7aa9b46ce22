"""Applies `min_p`, `top_k` and `top_p`, which limit the tokens that may be drawn.

A row is cut at a threshold on its logits, never at a rank. Tokens of equal logits are thus kept or cut together, and
the result does not depend on other rows of the batch."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from raylens.llm.host_values import HostValues
from raylens.llm.sampling.sampler_state import SamplerState

# Most nuclei are among so many of the likeliest tokens. Only rows with a larger nucleus are sorted in full.
NUCLEUS_PREFIX = 1024

Edit = Callable[[torch.Tensor], None]
"""Changes logits, (rows, vocab), float32, in place."""


def plan_truncation(values: HostValues, states: Sequence[SamplerState]) -> list[Edit]:
    """Adds the rows' settings to `values`. Returns the cuts, to apply in order once the values are on the device. They
    set the excluded tokens of logits, (len(states), vocab), to -inf. The logits are divided by the temperature, with
    0 as the highest of each row.

    The settings apply in vLLM's order, each to the remaining tokens. They cut:

    1. `min_p`: tokens less likely than `min_p` times the likeliest, like transformers' MinPLogitsWarper
    2. `top_k`: tokens less likely than the k-th, like transformers' TopKLogitsWarper
    3. `top_p`: tokens beyond the likeliest ones with a mass of at least `top_p`, like transformers' TopPLogitsWarper.
       The likeliest token always stays."""
    cuts = []
    if by_share := [row for row, state in enumerate(states) if state.params.min_p]:
        min_p = values.add(np.array([states[row].params.min_p for row in by_share], dtype=np.float32))
        cuts.append(_cut(values, by_share, lambda logits: values[min_p].log()))
    if by_rank := [row for row, state in enumerate(states) if _top_k(state)]:
        ranks = np.array([_top_k(states[row]) for row in by_rank])[:, None]
        top_k, rank_top_p = values.add(ranks), values.add(_top_ps(states, by_rank))
        most = int(ranks.max())
        cuts.append(
            _cut(values, by_rank, lambda logits: _rank_threshold(logits, most, values[top_k], values[rank_top_p]))
        )
    if by_mass := [row for row, state in enumerate(states) if not _top_k(state) and _top_p(state) < 1]:
        top_p = values.add(_top_ps(states, by_mass))
        cuts.append(_cut(values, by_mass, lambda logits: _mass_threshold(logits, values[top_p])))
    return cuts


def waits_for_device(state: SamplerState) -> bool:
    """Returns whether cutting the row may make the host wait for its logits."""
    return _top_p(state) < 1 and not _top_k(state) and state.vocab_size > NUCLEUS_PREFIX


def _top_k(state: SamplerState) -> int:
    """Returns the row's `top_k`, or 0 if it is off."""
    top_k = state.params.top_k or 0
    return top_k if 0 < top_k < state.vocab_size else 0


def _top_p(state: SamplerState) -> float:
    """Returns the row's `top_p`, or infinity if it is off. With 1, rounding of the cumulative mass could cut the last
    tokens."""
    top_p = state.params.top_p
    return math.inf if top_p is None or top_p == 1 else top_p


def _top_ps(states: Sequence[SamplerState], rows: list[int]) -> npt.NDArray[np.float64]:
    return np.array([_top_p(states[row]) for row in rows])[:, None]


def _cut(values: HostValues, rows: list[int], threshold: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Sets logits of the rows to -inf below `threshold`, which gets the rows and returns (len(rows),)."""
    index = values.add(np.array(rows))

    def cut(logits: torch.Tensor) -> None:
        own = logits[values[index]]
        logits[values[index]] = own.masked_fill_(own < threshold(own)[:, None], -torch.inf)

    return cut


def _rank_threshold(logits: torch.Tensor, most: int, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns the lowest logit of each row that `top_k` and then `top_p`, both (rows, 1), keep: (rows,). `most`: the
    largest `top_k`."""
    ordered = logits.topk(most, dim=-1).values
    ranks = torch.arange(most, device=logits.device)
    cumulative = ordered.exp().masked_fill_(ranks >= top_k, 0.0).cumsum(dim=-1, dtype=torch.float64)
    num_kept = _nucleus_size(cumulative, cumulative[:, -1:], top_p)
    return ordered.gather(1, torch.minimum(num_kept, top_k) - 1)[:, 0]


def _mass_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns the lowest logit of each row that `top_p`, (rows, 1), keeps: (rows,)."""
    total = logits.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    num_likeliest = min(NUCLEUS_PREFIX, logits.shape[1])
    lowest, num_kept = _nucleus_end(logits.topk(num_likeliest, dim=-1).values, total, top_p)
    if num_likeliest < logits.shape[1]:
        is_wide = num_kept == num_likeliest  # the whole prefix is needed, and perhaps more
        if bool(is_wide.any()):
            ordered = logits[is_wide].sort(dim=-1, descending=True).values
            lowest[is_wide], _ = _nucleus_end(ordered, total[is_wide], top_p[is_wide])
    return lowest


def _nucleus_end(ordered: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the lowest logit of each row's nucleus and the nucleus's size, (rows,) each. `ordered`: the highest
    logits, in descending order."""
    num_kept = _nucleus_size(ordered.exp().cumsum(dim=-1, dtype=torch.float64), total, top_p)
    return ordered.gather(1, num_kept - 1)[:, 0], num_kept[:, 0]


def _nucleus_size(cumulative: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns the number of likeliest tokens that make up `top_p` of the `total` mass, both (rows, 1): (rows, 1).
    `cumulative`: the cumulative mass of the likeliest tokens."""
    return ((cumulative < top_p * total).sum(dim=-1, keepdim=True) + 1).clamp_(max=cumulative.shape[1])
