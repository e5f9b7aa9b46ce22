"""Chooses tokens and reads them at once, as most tests of the sampler want them."""

from collections.abc import Sequence

import torch

from raylens.llm.sampling.sampler import SampledToken, choose
from raylens.llm.sampling.sampler_state import SamplerState


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | None]:
    return choose(logits, states).read()
