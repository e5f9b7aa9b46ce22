"""`min_p`, `top_k` and `top_p`: which tokens may be drawn.

A row's cut is a threshold on its logits, never a place in an order: tokens of equal logits stay or go together, and
no other row of the batch has a say in it.
"""

import math
from collections.abc import Sequence

import torch

from llm.sampler_state import SamplerState

# Most rows have their nucleus among this many tokens; only the others are sorted in full.
NUCLEUS_PREFIX = 1024


def truncate(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Sets to -inf, in place, what may not be drawn from `logits` (len(states), vocab), float32, which are divided by
    the temperature already and have 0 as the highest of each row.

    In vLLM's order, each on what the one before has left:

    1. `min_p`: tokens less likely than `min_p` times the likeliest, as transformers' MinPLogitsWarper
    2. `top_k`: tokens less likely than the k-th, as transformers' TopKLogitsWarper
    3. `top_p`: tokens that are not needed for a mass of at least `top_p`, likeliest first, as transformers'
       TopPLogitsWarper. The likeliest token always stays.
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
    """Infinite where it is off: then no mass is ever enough, also where the last tokens no longer add to it."""
    wanted = [states[row].params.top_p for row in rows]
    return [math.inf if top_p is None or top_p == 1 else top_p for top_p in wanted]


def _cut(logits: torch.Tensor, rows: list[int], lowest: torch.Tensor) -> None:
    """Sets to -inf what is below a row's lowest logit, (len(rows),)."""
    index = torch.tensor(rows, device=logits.device)
    kept = logits[index]
    logits[index] = kept.masked_fill_(kept < lowest[:, None], -torch.inf)


def _rank_threshold(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """The lowest logit that `top_k`, then `top_p`, keep in each row."""
    ordered = logits.topk(max(top_k), dim=-1).values
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    own_top_k = torch.tensor(top_k, device=logits.device)[:, None]
    cumulative = ordered.exp().masked_fill_(ranks >= own_top_k, 0.0).cumsum(dim=-1, dtype=torch.float64)
    num_kept = _nucleus_size(cumulative, cumulative[:, -1:], top_p)
    return ordered.gather(1, torch.minimum(num_kept, own_top_k) - 1)[:, 0]


def _mass_threshold(logits: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """The lowest logit that `top_p` keeps in each row."""
    total = logits.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    ordered = logits.topk(min(NUCLEUS_PREFIX, logits.shape[1]), dim=-1).values
    cumulative = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    num_kept = _nucleus_size(cumulative, total, top_p)
    lowest = ordered.gather(1, num_kept - 1)[:, 0]
    # Where the whole prefix is needed, more may be.
    wide = [row for row, size in enumerate(num_kept[:, 0].tolist()) if size == ordered.shape[1] < logits.shape[1]]
    if wide:
        ordered = logits[wide].sort(dim=-1, descending=True).values
        cumulative = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
        num_kept = _nucleus_size(cumulative, total[wide], [top_p[row] for row in wide])
        lowest[wide] = ordered.gather(1, num_kept - 1)[:, 0]
    return lowest


def _nucleus_size(cumulative: torch.Tensor, total: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """How many of the likeliest tokens make up `top_p` of the `total` (rows, 1), by cumulative mass: (rows, 1)."""
    needed = torch.tensor(top_p, dtype=torch.float64, device=cumulative.device)[:, None] * total
    return ((cumulative < needed).sum(dim=-1, keepdim=True) + 1).clamp_(max=cumulative.shape[1])
