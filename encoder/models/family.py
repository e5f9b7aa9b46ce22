"""What the encoder has to be told about a model family."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """`model_class` is the Hugging Face class without its language half.

    `encode(model, batch)` maps tensors stacked on axis 0 to one (num_tokens, hidden_size) tensor an item.
    """

    model_class: type[PreTrainedModel]
    encode: Callable[[PreTrainedModel, dict[str, torch.Tensor]], list[torch.Tensor]]
