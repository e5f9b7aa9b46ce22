"""Attention with a bias by distance, as in Inkling: a token adds a number to its score of each earlier position.

transformers computes the numbers for all distances, and attention picks them here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from raylens.llm.attention import AttentionBackend, AttentionCall
from raylens.llm.attention_variants.chosen_positions import ChoosingBackend, ChosenPositions, positions_of
from raylens.llm.step_input import StepInput

_MOST_SCORES = 2**24
"""So many scores are computed at once. A long prompt is divided, because each score has a bias of its own."""


class DistanceBiases:
    """The biases of a decoder's layers, for steps on `block_size` slots a block."""

    def __init__(self, decoder: nn.Module, block_size: int) -> None:
        self._block_size = block_size
        self._positions = _Positions()
        self.shapes = ()
        self.inputs: dict[str, Any] = {
            # Keeps the decoder from making masks.
            "attention_mask": {"full_attention": None, "sliding_attention": None, "linear_attention": None},
            "past_key_values": self._positions,
        }
        for module in decoder.modules():
            if (bias := getattr(module, "rel_logits_proj", None)) is not None:
                module.has_distance_bias = True  # type: ignore[assignment]
                bias.forward = partial(_by_distance, bias)

    @contextmanager
    def of(self, step: StepInput, attention: AttentionBackend) -> Iterator["BiasedStep"]:
        """Yields the attention of `step`."""
        assert isinstance(attention, ChoosingBackend)
        self._positions.step = step.positions[0]
        yield BiasedStep(attention, positions_of(step, self._block_size))


@dataclass(slots=True)
class _Positions:
    """What a layer takes for transformers' cache: the positions of the tokens. `step`: (num_tokens,)."""

    step: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int) -> torch.Tensor:
        """Returns the difference of the tokens' positions from their places in the step."""
        return self.step - torch.arange(len(self.step), device=self.step.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


def _by_distance(
    module: Any, relative_states: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
) -> torch.Tensor:
    """Takes (1, num_tokens, heads, dim). Returns the bias for each distance from 0 on, (1, heads, num_tokens,
    distances)."""
    bias: torch.Tensor = relative_states @ module.proj
    return bias.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class BiasedStep:
    """One step's `AttentionBackend`. `chunks`: the slots of the step's chunks."""

    attention: ChoosingBackend
    chunks: list[ChosenPositions]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.bias is None:
            return self.attention.attend(call)
        return self.attention.attend_chosen(call, [part for chunk in self.chunks for part in _parts(chunk, call)])


def _parts(chunk: ChosenPositions, call: AttentionCall) -> Iterator[ChosenPositions]:
    """Yields the chunk's tokens, as many at once as `_MOST_SCORES` allows, with what they see."""
    heads, num_rows = call.queries.shape[1], chunk.rows.stop - chunk.rows.start
    num_positions = len(chunk.slots)
    at_once = max(1, _MOST_SCORES // (heads * num_positions))
    for start in range(0, num_rows, at_once):
        rows = slice(chunk.rows.start + start, chunk.rows.start + min(start + at_once, num_rows))
        end = num_positions - num_rows + rows.stop - chunk.rows.start
        first = 0 if call.window is None else max(0, end - (rows.stop - rows.start) - call.window + 1)
        yield replace(chunk, rows=rows, slots=chunk.slots[first:end], mask=_mask(call, rows, first, end))


def _mask(call: AttentionCall, rows: slice, first: int, end: int) -> torch.Tensor:
    """Returns the bias (heads, num_queries, end - first) of the tokens `rows`, up to position `end`, towards the
    positions [first, end). It is -inf for those that they do not see, and 0 beyond the distances that have one."""
    assert call.bias is not None
    bias = call.bias[:, rows]
    positions = torch.arange(first, end, device=bias.device)
    distances = positions[end - first - bias.shape[1] :, None] - positions
    near = distances.clamp(0, bias.shape[-1] - 1).expand(len(bias), -1, -1)
    is_hidden = (distances < 0) | (distances >= (call.window or end))
    return bias.gather(-1, near).masked_fill(distances >= bias.shape[-1], 0.0).masked_fill(is_hidden, -torch.inf)
