"""What the engine has to be told about a model family."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LanguageFamily:
    """`model_class` is the Hugging Face class without its vision half; `decoder(model)` is the stack of decoder
    layers that takes `inputs_embeds` and `position_ids`. Item embeddings take the places of their placeholders
    and decoding is plainly causal."""

    model_class: type[PreTrainedModel]
    decoder: Callable[[PreTrainedModel], nn.Module]
