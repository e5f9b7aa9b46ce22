"""Cross states: the states, beside its own tokens, that a sequence attends to. They are computed once, and lie in
blocks of their own."""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from raylens.llm.sequence import Sequence


class CrossView(NamedTuple):
    """From the decoder's position `first` on, tokens attend to the states [start, end). `is_own`: whether these belong
    to the token; False for tokens before all pictures, to which some models show everything."""

    first: int
    start: int
    end: int
    is_own: bool


@dataclass(frozen=True, slots=True)
class CrossSource:
    """The origin of a sequence's cross states.

    `token_ids`: the input of the text encoder, one for each state. Empty without an encoder.
    `num_prompt_tokens`: of the request's prompt, which has the tokens of items and text encoder besides the decoder's.
    `positions`: for each item, the indices of its embeddings among the states or in the encoder's input.
    `views`: ascending. The last one holds for generated tokens, too."""

    num_states: int
    token_ids: Seq[int]
    num_prompt_tokens: int
    positions: Seq[Seq[int]]
    views: Seq[CrossView]

    def views_between(self, start: int, end: int) -> list[tuple[int, CrossView]]:
        """Returns the views of the decoder's positions [start, end), each with its number of positions."""
        index = bisect_right(self.views, start, key=lambda view: view.first) - 1
        found = []
        while start < end:
            until = min(end, self.views[index + 1].first if index + 1 < len(self.views) else end)
            found.append((until - start, self.views[index]))
            start, index = until, index + 1
        return found


class CrossBlocks:
    """Assigns blocks of `block_size` cross states to running sequences. No two sequences share a block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._free = list(range(num_blocks))

    @property
    def usage(self) -> float:
        """Returns the share of the blocks that are in use, 0 to 1."""
        return 1 - len(self._free) / self._num_blocks

    def have_room(self, sequence: "Sequence", without: Seq["Sequence"] = ()) -> bool:
        """Returns whether the sequence's states fit, once the sequences `without` have given up their blocks."""
        num_given_up = sum(len(one.cross_table) for one in without)
        return self._num_needed(sequence) <= len(self._free) + num_given_up

    def take(self, sequence: "Sequence") -> None:
        """Gives a sequence the blocks for its states, the lowest ones, so that they are often consecutive."""
        assert not sequence.cross_table
        count = self._num_needed(sequence)
        sequence.cross_table, self._free = self._free[:count], self._free[count:]

    def give_back(self, sequence: "Sequence") -> None:
        self._free = sorted([*self._free, *sequence.cross_table])
        sequence.cross_table = []
        sequence.has_cross_states = False

    def check_integrity(self, sequences: Seq["Sequence"]) -> None:
        """Raises RuntimeError unless each block belongs to one of `sequences` or is free."""
        held = [block_id for sequence in sequences for block_id in sequence.cross_table]
        if sorted([*held, *self._free]) != list(range(self._num_blocks)):
            raise RuntimeError(f"blocks of cross states lost or doubled: {len(held)} held, {len(self._free)} free")

    def _num_needed(self, sequence: "Sequence") -> int:
        source = sequence.cross_source
        return 0 if source is None else -(-source.num_states // self._block_size)
