"""Applies `min_p`, `top_k` and `top_p`, which limit the tokens that may be drawn.

A row is cut at a threshold on its logits, never at a place in an order. So tokens of equal logits are kept or cut
together, and no other row of the batch changes the result.
"""

import math
from collections.abc import Sequence

import torch

from llm.sampler_state import SamplerState

# Most rows have their nucleus among so many of their likeliest tokens. Only the other rows are sorted in full.
NUCLEUS_PREFIX = 1024


def truncate(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Sets to -inf, in place, the tokens of `logits` (len(states), vocab), float32, that may not be drawn. The logits
    are already divided by the temperature, and each row's highest is 0.

    The settings apply in vLLM's order, each to the tokens that the one before has left. They cut:

    1. `min_p`: tokens less likely than `min_p` times the likeliest, as transformers' MinPLogitsWarper does
    2. `top_k`: tokens less likely than the k-th, as transformers' TopKLogitsWarper does
    3. `top_p`: tokens that are not needed for a mass of at least `top_p`, likeliest first, as transformers'
       TopPLogitsWarper does. The likeliest token always stays.
    """
    if min_p := [(row, state.params.min_p) for row, state in enumerate(states) if state.params.min_p]:
        lowest = torch.tensor([value for _, value in min_p], device=logits.device).log()
        _cut(logits, [row for row, _ in min_p], lowest)
    by_rank = [row for row, state in enumerate(states) if 0 < _top_k(state) < logits.shape[1]]
    if by_rank:
        top_k = [_top_k(states[row]) for row in by_rank]
        _cut(logits, by_rank, _rank_threshold(logits[by_rank], top_k, _top_p(states, by_rank)))
    by_mass = [row for row in range(len(states)) if row not in set(by_rank) and _top_p(states, [row])[0] < 1]
    if by_mass:
        _cut(logits, by_mass, _mass_threshold(logits[by_mass], _top_p(states, by_mass)))


def _top_k(state: SamplerState) -> int:
    return state.params.top_k or 0


def _top_p(states: Sequence[SamplerState], rows: list[int]) -> list[float]:
    """Returns each row's `top_p`, or infinity where it is off: no mass is ever enough then, even where rounding keeps
    the last tokens from adding to the cumulative mass."""
    wanted = [states[row].params.top_p for row in rows]
    return [math.inf if top_p is None or top_p == 1 else top_p for top_p in wanted]


def _cut(logits: torch.Tensor, rows: list[int], lowest: torch.Tensor) -> None:
    """Sets to -inf the logits that are below the lowest one that their row keeps; `lowest` is (len(rows),)."""
    index = torch.tensor(rows, device=logits.device)
    kept = logits[index]
    logits[index] = kept.masked_fill_(kept < lowest[:, None], -torch.inf)


def _rank_threshold(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Returns the lowest logit that `top_k`, then `top_p`, keep in each row: (rows,)."""
    ordered = logits.topk(max(top_k), dim=-1).values
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    own_top_k = torch.tensor(top_k, device=logits.device)[:, None]
    cumulative = ordered.exp().masked_fill_(ranks >= own_top_k, 0.0).cumsum(dim=-1, dtype=torch.float64)
    num_kept = _nucleus_size(cumulative, cumulative[:, -1:], top_p)
    return ordered.gather(1, torch.minimum(num_kept, own_top_k) - 1)[:, 0]


def _mass_threshold(logits: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Returns the lowest logit that `top_p` keeps in each row: (rows,)."""
    total = logits.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    ordered = logits.topk(min(NUCLEUS_PREFIX, logits.shape[1]), dim=-1).values
    cumulative = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    num_kept = _nucleus_size(cumulative, total, top_p)
    lowest = ordered.gather(1, num_kept - 1)[:, 0]
    # Rows that need the whole prefix may need more tokens than that.
    wide = [row for row, size in enumerate(num_kept[:, 0].tolist()) if size == ordered.shape[1] < logits.shape[1]]
    if wide:
        ordered = logits[wide].sort(dim=-1, descending=True).values
        cumulative = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
        num_kept = _nucleus_size(cumulative, total[wide], [top_p[row] for row in wide])
        lowest[wide] = ordered.gather(1, num_kept - 1)[:, 0]
    return lowest


def _nucleus_size(cumulative: torch.Tensor, total: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Returns how many of the likeliest tokens make up `top_p` of the `total` mass (rows, 1): (rows, 1). `cumulative`
    is the mass of the likeliest tokens up to each."""
    needed = torch.tensor(top_p, dtype=torch.float64, device=cumulative.device)[:, None] * total
    return ((cumulative < needed).sum(dim=-1, keepdim=True) + 1).clamp_(max=cumulative.shape[1])
