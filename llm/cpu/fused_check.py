"""Compares a fused decoder with transformers' own forward, once at start-up, on random tokens at random positions."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_input import StepBuilder, StepInput

logger = logging.getLogger(__name__)

_MAX_TOKENS = 24
_TOLERANCE = 1e-3
"""Relative to the largest number. Rounding in a deep decoder causes a hundredth of this, a missing part far more."""

_ITEM_ROWS = slice(2, 6)
Forward = Callable[[StepInput], tuple[torch.Tensor, torch.Tensor]]
"""Returns a step's hidden states, (num_tokens, hidden_size), and logits, (num_sampling, vocab)."""


@torch.inference_mode()
def agree(
    fused: Forward,
    whole: Forward,
    builder: StepBuilder,
    *,
    num_slots: int,
    block_size: int,
    num_positions: int,
    vocab_size: int,
    embedding_size: int,
) -> bool:
    """Returns whether `fused` and `whole` agree within the tolerance, on a prompt with an item and on the token after
    it; logs a warning if not. Both write to the first slots of the cache. `embedding_size`: of the item."""
    num_tokens = min(_MAX_TOKENS, builder.max_num_tokens, num_slots - 1)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocab_size, (num_tokens + 1,), generator=generator).tolist()
    sequence = Sequence("trial", token_ids, num_tokens, [], num_tokens + 1)
    sequence.block_table = list(range(-(-len(token_ids) // block_size)))
    for length in (num_tokens, 1):
        step = builder.build([ScheduledChunk(sequence, length)])
        positions = torch.randint(num_positions, step.positions.shape, generator=generator)
        step = replace(step, positions=positions)
        if length > 1:
            item_rows = torch.arange(length)[_ITEM_ROWS]
            embeds = torch.randn(len(item_rows), embedding_size, generator=generator)
            step = replace(step, embed_rows=item_rows, embeds=[embeds])
        for expected, found in zip(whole(step), fused(step), strict=True):
            if not expected.numel():  # the prompt's step has no logits
                continue
            difference = (expected - found).abs().max() / expected.abs().max()
            if not difference <= _TOLERANCE:  # also where it is NaN
                logger.warning("the decoder's layers run one by one: fused they are off by %.2g", difference)
                return False
        sequence.num_computed_tokens += length
    return True
