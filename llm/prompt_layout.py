"""How the positions of one prompt relate: their rotary positions, and which of them also see later positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """The positions [start, end) of a prompt, in which all `members` (ascending) see each other, also later ones.

    The whole span has to be computed in one chunk, because a member depends on positions behind it.
    """

    start: int
    end: int
    members: Sequence[int]

    @classmethod
    def of(cls, members: Sequence[int]) -> "BidirectionalSpan":
        return cls(members[0], members[-1] + 1, members)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """How the positions of one prompt relate, by the rules of its model family.

    `rope_positions` (num_axes, num_prompt_tokens): the rotary positions of the prompt's tokens. None: all axes are
    equal, and a position is the token's index plus the offset.
    `rope_offsets`: for each axis, the difference between a generated token's rotary position and its index in the
    sequence.
    `spans`: ascending, apart from each other.
    `is_prefix_cacheable`: whether the keys and values of a position follow from the tokens up to it and the items that
    these tokens belong to. They do not where a span covers several items or text.
    """

    rope_positions: npt.NDArray[np.int64] | None = None
    rope_offsets: tuple[int, ...] = (0,)
    spans: tuple[BidirectionalSpan, ...] = ()
    is_prefix_cacheable: bool = True

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the rotary positions of the tokens [start, end) of the sequence, prompt or generated: (num_axes,
        end - start), or (1, end - start) where all axes are equal."""
        generated: npt.NDArray[np.int64] = np.arange(start, end) + np.array(self.rope_offsets)[:, None]
        if self.rope_positions is None or start >= self.rope_positions.shape[1]:
            return generated
        prompt = self.rope_positions[:, start:end]
        return np.concatenate([prompt, generated[:, prompt.shape[1] :]], axis=1)


PLAIN = PromptLayout()
