"""How far `quantization` moves the distributions of the next token from those of the stored weights."""

from typing import NamedTuple, Self

import torch

from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_input import StepBuilder, StepInput

TEXT = (
    "The photograph shows a harbour in the early morning. Two fishing boats, one red and one white, lie at the quay,"
    " and a man in a blue coat carries a wooden box up the stairs. Behind him, a sign reads 'Open from 7 to 11'."
    ' Question: how many boats are there? Answer: two. As JSON: {"boats": 2, "colours": ["red", "white"]}.'
    " If the shop opens at seven and closes at eleven, it is open for four hours a day, which makes 28 hours a week."
)

NOT_MEASURED = "its loss is not measured, because loading converts the stored weights or the model needs a picture"
MAX_TOKENS = 100
"""Of the text: their float32 products with the stored weights take as long as to read and convert these."""
_ROWS_AT_ONCE = 16


class QuantizationLoss(NamedTuple):
    """`divergence`: mean KL divergence in nats of the next token's distribution after each of `num_tokens` tokens, from
    the stored weights' one. `num_same`: those after which the same token is the likeliest."""

    divergence: float
    num_same: int
    num_tokens: int

    @classmethod
    def of(cls, stored: torch.Tensor, quantized: torch.Tensor) -> Self:
        """Takes logits, (num_tokens, vocab)."""
        same = stored.argmax(-1) == quantized.argmax(-1)
        return cls(divergence(stored, quantized), int(same.sum()), len(same))

    def __str__(self) -> str:
        return (
            f"mean KL divergence from the stored weights {self.divergence:.2g} nats, the same likeliest token after"
            f" {self.num_same} of {self.num_tokens} tokens of a text"
        )


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the mean KL divergence in nats of rows of logits."""
    total = 0.0
    for rows in zip(*(torch.split(one, _ROWS_AT_ONCE) for one in (expected, found)), strict=True):
        log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in rows)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(expected)


def text_step(builder: StepBuilder, token_ids: list[int], layout: PromptLayout, block_size: int) -> StepInput:
    """Returns a step over a whole text in the first blocks of the cache, with the logits after its last token."""
    sequence = Sequence("trial", token_ids, len(token_ids), [], len(token_ids) + 1, layout=layout)
    sequence.block_table = list(range(-(-len(token_ids) // block_size)))
    return builder.build([ScheduledChunk(sequence, len(token_ids))])
