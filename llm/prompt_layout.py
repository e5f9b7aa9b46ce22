"""How the positions of one prompt relate, where that is more than "each sees all before it, and they count from 0"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """Positions [start, end) of a prompt, of which those in `members` (ascending) also see the later ones among them.

    All of the span is computed in one chunk: what a position holds depends on positions behind it.
    """

    start: int
    end: int
    members: Sequence[int]

    @classmethod
    def of(cls, members: Sequence[int]) -> "BidirectionalSpan":
        return cls(members[0], members[-1] + 1, members)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """What a model family says of one prompt.

    `rope_positions` (num_axes, num_prompt_tokens): positions of the prompt's tokens, as the model
    counts them, None: `rope_offset`, `rope_offset` + 1, ...
    `rope_offset`: what a generated token's position is beyond its index in the sequence.
    `spans`: ascending, apart from each other. `is_prefix_cacheable`: whether the keys and values of a position follow
    from the tokens up to it and the items that these belong to; not so where a span goes over several items or text.
    """

    rope_positions: npt.NDArray[np.int64] | None = None
    rope_offset: int = 0
    spans: tuple[BidirectionalSpan, ...] = ()
    is_prefix_cacheable: bool = True

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Positions of the tokens [start, end) of the sequence, prompt or generated: (num_axes, end - start), or one
        axis for all."""
        generated = np.arange(start + self.rope_offset, end + self.rope_offset)[None]
        if self.rope_positions is None or start >= self.rope_positions.shape[1]:
            return generated
        prompt = self.rope_positions[:, start:end]
        rest = generated[:, prompt.shape[1] :]
        return np.concatenate([prompt, np.broadcast_to(rest, (len(prompt), rest.shape[1]))], axis=1)


PLAIN = PromptLayout()
