"""The outputs of one step's chunks."""

from dataclasses import dataclass

import torch

from raylens.llm.sampling.logprobs import TokenLogprobs


@dataclass(slots=True)
class StepOutput:
    """The outputs of one step: `logits`, float32 (number of chunks that sample, vocab), and the `prompt_logprobs` of
    all chunks' `scored_tokens`, in order."""

    logits: torch.Tensor
    prompt_logprobs: list[TokenLogprobs]
