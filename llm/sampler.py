"""Logits to token ids, each row by its own sampling parameters."""

import torch

from llm.sequence import Sequence

# Below this the softmax is an argmax, and the division would overflow.
_GREEDY_TEMPERATURE = 1e-4


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> list[int | None]:
    """Returns one token id a row of `logits` (len(sequences), vocab), float32; may overwrite `logits`.

    A row that holds NaN gives None: what made it concerns its sequence alone.
    """
    for row, sequence in zip(logits, sequences, strict=True):
        params = sequence.sampling_params
        if eos_token_ids and not params.ignore_eos and sequence.num_output_tokens < params.min_tokens:
            row[list(eos_token_ids)] = -torch.inf
    token_ids: list[int | None] = list(logits.argmax(dim=-1).tolist())
    is_broken: list[bool] = logits.isnan().any(dim=-1).tolist()
    for i, sequence in enumerate(sequences):
        temperature = sequence.sampling_params.temperature or 0.0
        if is_broken[i]:
            token_ids[i] = None
        elif temperature > _GREEDY_TEMPERATURE:
            token_ids[i] = _sample_row(logits[i], sequence, temperature)
    return token_ids


def _sample_row(logits: torch.Tensor, sequence: Sequence, temperature: float) -> int:
    """Draws from softmax(logits / temperature) cut to the top k tokens, then to the smallest set of mass top p."""
    params = sequence.sampling_params
    logits, token_ids = (logits / temperature).sort(descending=True)
    if params.top_k:
        logits, token_ids = logits[: params.top_k], token_ids[: params.top_k]
    probabilities = logits.softmax(dim=-1)
    if params.top_p is not None and params.top_p < 1:
        is_cut = probabilities.cumsum(dim=-1) - probabilities >= params.top_p
        is_cut[0] = False  # the likeliest token stays however small top p is
        probabilities = probabilities.masked_fill(is_cut, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=sequence.generator)
    return int(token_ids[drawn])
