"""The layout of one prompt: its rotary positions and its spans of bidirectional attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """The positions [start, end) of a prompt. All `members` (ascending) attend to each other, in both directions. One
    chunk computes the whole span, because a member depends on later positions."""

    start: int
    end: int
    members: Sequence[int]

    @classmethod
    def of(cls, members: Sequence[int]) -> "BidirectionalSpan":
        return cls(members[0], members[-1] + 1, members)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The layout of one prompt, by the rules of its model family.

    `rope_positions` (num_axes, num_prompt_tokens): the rotary positions of the prompt's tokens. None: all axes are
    equal, and a position is the token's index plus the offset.
    `rope_offsets`: for each axis, a generated token's rotary position minus its index in the sequence.
    `spans`: ascending and disjoint.
    `is_prefix_cacheable`: whether keys and values of a position depend only on the tokens up to it and on these tokens'
    items. False if a span covers several items or text.
    `longest`: the most tokens of a sequence with this layout. Longer ones have the layout `beyond`, in which all keys
    differ. `cache_name`: separates layouts in the prefix cache whose keys differ for equal tokens."""

    rope_positions: npt.NDArray[np.int64] | None = None
    rope_offsets: tuple[int, ...] = (0,)
    spans: tuple[BidirectionalSpan, ...] = ()
    is_prefix_cacheable: bool = True
    longest: int | None = None
    beyond: "PromptLayout | None" = None
    cache_name: bytes = b""

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the rotary positions of the tokens [start, end) of the sequence, prompt or generated: (num_axes,
        end - start), or (1, end - start) if all axes are equal."""
        generated: npt.NDArray[np.int64] = np.arange(start, end) + np.array(self.rope_offsets)[:, None]
        if self.rope_positions is None or start >= self.rope_positions.shape[1]:
            return generated
        prompt = self.rope_positions[:, start:end]
        return np.concatenate([prompt, generated[:, prompt.shape[1] :]], axis=1)


PLAIN = PromptLayout()
