"""Turns logits into token ids, each row of a batch by its own sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpu_kernels.library import kernel_library
from llm.kernel_sampler import choose_by_kernels
from llm.logits_processors import process_logits
from llm.logprobs import TokenLogprobs, token_logprobs
from llm.sampler_state import SamplerState
from llm.truncation import truncate

_TOKENS_PER_GROUP = 128


@dataclass(slots=True)  # not frozen: to freeze it would cost a microsecond for each token
class SampledToken:
    """The token chosen for one row, with its `logprobs` where the row's parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | None]:
    """Chooses one token for each row of `logits` (len(states), vocab), float32, and appends it to the row's state.

    Settings apply in vLLM's order: log-probabilities of the raw logits, then `process_logits`. Then a greedy row takes
    its likeliest token. For any other row the temperature, `truncate` and a draw follow.

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
    """Returns each row's next token, or None for a row whose highest logit is not finite."""
    token_ids = _likeliest(logits)
    if any(state.edits_logits for state in states):
        process_logits(logits, states)
        token_ids = [None if before is None else own for before, own in zip(token_ids, _likeliest(logits), strict=True)]
    drawing = [row for row, state in enumerate(states) if token_ids[row] is not None and not state.is_greedy]
    if drawing:
        drawn = _draw(logits[drawing], [states[row] for row in drawing])
        for row, token_id in zip(drawing, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def _num_top(state: SamplerState) -> int:
    return state.params.logprobs or 0


def _likeliest(logits: torch.Tensor) -> list[int | None]:
    """Returns each row's first token of the highest logit, or None where that logit is not finite. A NaN counts as the
    highest."""
    highest, indices = logits.max(dim=-1)
    found = zip(indices.tolist(), highest.isfinite().tolist(), strict=True)
    return [token_id if is_finite else None for token_id, is_finite in found]


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Draws from each row's truncated softmax(logits / temperature). Overwrites `logits`."""
    temperatures = torch.tensor([state.params.temperature or 0.0 for state in states], device=logits.device)
    logits /= temperatures[:, None]
    logits -= logits.amax(dim=-1, keepdim=True)
    truncate(logits, states)
    uniforms = torch.tensor([state.draw_uniform() for state in states], dtype=torch.float64, device=logits.device)
    token_ids: list[int] = _invert_cdf(logits.exp_(), uniforms).tolist()
    return token_ids


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
    group = torch.searchsorted(cumulative, targets, right=True)
    rest = targets - cumulative.gather(1, (group - 1).clamp_(min=0)).masked_fill_(group == 0, 0.0)
    inside = groups[torch.arange(len(groups), device=groups.device), group[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # The two sums of a group may differ in their last bits. The bound keeps the token within the group.
    rest = torch.minimum(rest, torch.nextafter(inside[:, -1:], torch.zeros_like(rest)))
    return (group * _TOKENS_PER_GROUP + torch.searchsorted(inside, rest, right=True))[:, 0]
