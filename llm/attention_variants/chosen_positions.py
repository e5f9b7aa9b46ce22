"""Attention of layers whose tokens see chosen positions only, or add a number to each score."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch

from raylens.llm.attention import AttentionBackend, AttentionCall
from raylens.llm.host_values import send
from raylens.llm.step_input import StepInput, slots_of


@dataclass(slots=True)
class ChosenPositions:
    """The positions that the tokens of a chunk see. `rows`: the chunk's among the step's tokens. `slots`: the cache
    slots of the positions that it may see. `mask`: (num_queries, num_positions), or (heads, num_queries, num_positions)
    if heads differ. Bool, True where seen, or what is added to the scores."""

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor


def positions_of(step: StepInput, block_size: int) -> list[ChosenPositions]:
    """Returns the positions of each chunk of the step, with empty masks."""
    starts = accumulate(step.query_lengths, initial=0)
    device, mask = step.slot_mapping.device, torch.empty(0, dtype=torch.bool)
    chunks = zip(starts, step.query_lengths, step.context_lengths, step.block_tables, strict=False)
    return [
        ChosenPositions(slice(start, start + length), send(slots_of(blocks, 0, end, block_size), device), mask)
        for start, length, end, blocks in chunks
    ]


@runtime_checkable
class ChoosingBackend(AttentionBackend, Protocol):
    """The attention of a step over chosen positions, and the cache of the indexers' keys."""

    def attend_chosen(self, call: AttentionCall, chosen: Sequence[ChosenPositions]) -> torch.Tensor:
        """Does as `attend`, over the chosen positions of each chunk."""

    def extend_index(self, layer: int, rows: slice, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Stores the index keys of the step's tokens `rows`, (num_tokens, dim). Returns those at `slots`."""


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """One step's `AttentionBackend`. Layers that choose positions attend to the `chosen` ones. An indexer sets the
    masks for its own layer and for the next ones, up to the next indexer."""

    attention: ChoosingBackend
    chosen: Sequence[ChosenPositions]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.attention.attend_chosen(call, self.chosen) if call.sees_chosen else self.attention.attend(call)
