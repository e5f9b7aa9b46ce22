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


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """What a model family says of one prompt.

    `rope_positions`, int64 of shape (num_axes, num_prompt_tokens) or (num_prompt_tokens,), None: 0, 1, 2, ...
    `rope_offset`: what a generated token's rotary position is beyond its index in the sequence.
    `spans`: ascending, apart from each other. `is_prefix_cacheable`: whether the keys and values of a position follow
    from the tokens up to it and the items that these belong to; not so where a span goes over several items or text.
    """

    rope_positions: torch.Tensor | None = None
    rope_offset: int = 0
    spans: tuple[BidirectionalSpan, ...] = ()
    is_prefix_cacheable: bool = True


PLAIN = PromptLayout()
