"""How the positions of one prompt relate, where that is more than "each sees all before it, and they count from 0"."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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

    `rope_positions`, int64 of shape (num_axes, num_prompt_tokens): positions of the prompt's tokens, as the model
    counts them, None: `rope_offset`, `rope_offset` + 1, ...
    `rope_offset`: what a generated token's position is beyond its index in the sequence.
    `spans`: ascending, apart from each other. `is_prefix_cacheable`: whether the keys and values of a position follow
    from the tokens up to it and the items that these belong to; not so where a span goes over several items or text.
    """

    rope_positions: torch.Tensor | None = None
    rope_offset: int = 0
    spans: tuple[BidirectionalSpan, ...] = ()
    is_prefix_cacheable: bool = True

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Positions of the tokens [start, end) of the sequence, prompt or generated: int64 (num_axes, end - start)."""
        generated = torch.arange(start, end) + self.rope_offset
        if self.rope_positions is None:
            return generated.unsqueeze(0)
        prompt = self.rope_positions[:, start:end]
        return torch.cat([prompt, generated[prompt.shape[1] :].expand(len(prompt), -1)], dim=1)


PLAIN = PromptLayout()
