"""Computes log-probabilities of tokens, for clients that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylens.llm.host_values import HostCopy, send


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position, its log-probability in nats, its rank (1 is the likeliest), and the likeliest tokens
    with their log-probabilities. A token without a logit, such as a placeholder beyond the vocabulary, has -inf."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class LogprobsCopy:
    """An asynchronous copy to the host: log-probabilities of one token a row, and of the row's likeliest tokens or of
    others."""

    def __init__(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: Sequence[int],
        others: Sequence[Sequence[int]] = (),
    ) -> None:
        """Launches the computation from `logits` (num_rows, vocab), float32, and `token_ids` (num_rows,), int64, with
        at least one row. `num_top`: the number of likeliest tokens to name for each row. `others`: for each row the
        tokens to name in place of these, if any; empty: for no row."""
        logprobs = logits.log_softmax(dim=-1)
        ids, num_logits = token_ids[:, None], logits.shape[1]
        chosen = logprobs.gather(1, ids.clamp(max=num_logits - 1)).masked_fill(ids >= num_logits, -torch.inf)
        ranks = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
        values, indices = logprobs.topk(min(max(num_top), num_logits), dim=-1)
        self._named = [slice(number) for number in num_top]
        if any(others):
            width, start = max(map(len, others)), indices.shape[1]
            padded = send(np.array([[*own, *[0] * (width - len(own))] for own in others], np.int64), logits.device)
            values, indices = torch.cat([values, logprobs.gather(1, padded)], -1), torch.cat([indices, padded], -1)
            self._named = [
                slice(start, start + len(own)) if own else slice(number)
                for own, number in zip(others, num_top, strict=True)
            ]
        self._logprobs = HostCopy(torch.cat([chosen, values], dim=-1))
        self._integers = HostCopy(torch.cat([ids, ranks, indices], dim=-1))

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self._logprobs.read(), self._integers.read(), self._named, strict=True)
        return [
            TokenLogprobs(token_id, logprob, rank, list(zip(ids, logprobs, strict=True))[named])
            for (logprob, *logprobs), (token_id, rank, *ids), named in rows
        ]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of each row's token and of the row's `num_top` likeliest tokens.

    The result is the log-softmax of `logits` (len(token_ids), vocab), float32: the model's own, before penalties and
    temperature (vLLM's `raw_logprobs`). For a prompt, row i has the logits of position i, and `token_ids[i]` is the
    token at position i + 1. The call allocates as much memory again as `logits`: pass a long prompt in parts."""
    if not token_ids:
        return []
    return LogprobsCopy(logits, send(np.array(token_ids, dtype=np.int64), logits.device), num_top).read()
