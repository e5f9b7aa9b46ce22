"""Log-probabilities of tokens, for clients that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position: its log-probability in nats, its rank (1 is the likeliest), and the likeliest tokens
    there with theirs, in order. A log-probability may be -inf where the model itself excludes a token."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """What `logits` (len(token_ids), vocab), float32, the model's own, say about each row's token.

    Log-softmax of the raw logits, before penalties and temperature (vLLM's `raw_logprobs`). Of the output a row is what
    a token was drawn from; of the prompt row i is of position i and `token_ids[i]` stands at position i + 1. Takes
    as much memory again as `logits`: give a long prompt in parts.
    """
    if not token_ids:
        return []
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, indices = logprobs.topk(min(max(num_top), logprobs.shape[1]), dim=-1)
    tops = [list(zip(ids, row, strict=True)) for ids, row in zip(indices.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprobs(token_id, logprob, rank, top[:wanted])
        for token_id, logprob, rank, top, wanted in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), tops, num_top, strict=True
        )
    ]
