"""Applies edits of logits as the sampler does, in place."""

from collections.abc import Callable, Sequence

import torch

from raylens.llm.host_values import HostValues
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sampling.truncation import Edit

Plan = Callable[[HostValues, Sequence[SamplerState]], list[Edit]]


def apply(plan: Plan, logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    values = HostValues(logits.device)
    edits = plan(values, states)
    values.upload()
    for edit in edits:
        edit(logits)
