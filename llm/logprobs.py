"""Computes log-probabilities of tokens, for clients that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position: its log-probability in nats, its rank (1 is the likeliest), and the likeliest tokens
    at the position with their log-probabilities, likeliest first.

    A log-probability may be -inf where the model itself excludes a token, and where it has no logit for it, as for an
    item's placeholder behind the vocabulary."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of each row's token and of the row's `num_top` likeliest tokens.

    They are the log-softmax of `logits` (len(token_ids), vocab), float32, which are the model's own, before penalties
    and temperature (vLLM's `raw_logprobs`). For output tokens a row has the logits that its token was chosen from. For
    a prompt row i has the logits of position i, and `token_ids[i]` is the token at position i + 1. The call takes as
    much memory again as `logits`: give a long prompt in parts.
    """
    if not token_ids:
        return []
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    num_logits = logits.shape[1]
    chosen = logprobs.gather(1, ids.clamp(max=num_logits - 1)).masked_fill(ids >= num_logits, -torch.inf)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, indices = logprobs.topk(min(max(num_top), num_logits), dim=-1)
    tops = [list(zip(ids, row, strict=True)) for ids, row in zip(indices.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprobs(token_id, logprob, rank, top[:wanted])
        for token_id, logprob, rank, top, wanted in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), tops, num_top, strict=True
        )
    ]
