"""What running one step's chunks gives."""

from dataclasses import dataclass

import torch

from llm.logprobs import TokenLogprobs


@dataclass(slots=True)
class StepOutput:
    """`logits`, float32 (number of chunks that sample, vocab); `prompt_logprobs` of all `scored_tokens`, in order."""

    logits: torch.Tensor
    prompt_logprobs: list[TokenLogprobs]
