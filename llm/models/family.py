"""What the engine has to be told about a model family."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llm.prompt_layout import PLAIN, PromptLayout
from preprocess.schema import ProcessedPrompt


@dataclass(frozen=True, slots=True)
class LanguageFamily:
    """`model_class` is the Hugging Face class without its vision half; `decoder(model)` is the stack of decoder
    layers that takes `inputs_embeds` and `position_ids`. Item embeddings take the places of their placeholders.
    `layout(config, prompt)` says how the prompt's positions relate."""

    model_class: type[PreTrainedModel]
    decoder: Callable[[PreTrainedModel], nn.Module]
    layout: Callable[[PreTrainedConfig, ProcessedPrompt], PromptLayout] = lambda config, prompt: PLAIN
