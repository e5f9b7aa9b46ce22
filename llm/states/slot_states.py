"""The states of a step's decoding rows, in the slots where they lie.

A layer computes all rows together. A guess continues from the state of the row before it, so the states change in
waves: first by one row of each sequence, then by the first guesses, and so on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch

from raylens.llm.step_input import StateChunk


@dataclass(frozen=True, slots=True)
class Wave:
    """Consecutive rows, none of which continues from another one. They read the slots `sources` and write `targets`."""

    rows: slice
    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class SlotStates:
    """States of one kind, (num_slots, ...), and the rows that change them."""

    pool: torch.Tensor
    waves: Sequence[Wave]

    def read(self, wave: Wave) -> torch.Tensor:
        """Returns the states before these rows, which a layer may change: the slots themselves if all rows stay in
        theirs and these are side by side, else copies."""
        if wave.sources == wave.targets:
            return self.pool[_place(wave.targets)]
        return self.pool[torch.tensor(wave.sources)]

    def write(self, wave: Wave, states: torch.Tensor) -> None:
        place = _place(wave.targets)
        is_changed_in_place = isinstance(place, slice) and states.data_ptr() == self.pool[place].data_ptr()
        if not is_changed_in_place:
            self.pool[place] = states


def waves_of(chunks: Sequence[StateChunk]) -> list[Wave]:
    """Returns the waves of chunks of single tokens, which are sorted by `depth`."""
    waves, start = [], 0
    for _, same in groupby(chunks, key=attrgetter("depth")):
        slots = [(one.source, one.target) for one in same if one.source is not None and one.target is not None]
        sources, targets = map(list, zip(*slots, strict=True))
        waves.append(Wave(slice(start, start + len(slots)), sources, targets))
        start += len(slots)
    return waves


def _place(slots: list[int]) -> slice | torch.Tensor:
    """Returns a slice of slots that are side by side, else their indices."""
    is_row = slots == list(range(slots[0], slots[0] + len(slots)))
    return slice(slots[0], slots[0] + len(slots)) if is_row else torch.tensor(slots)
