"""LLaVA 1.5: any causal decoder of transformers behind a projector."""

from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from llm.models.family import LanguageFamily


class LlavaLanguageHalf(LlavaForConditionalGeneration):
    """LLaVA without vision tower and projector; their part of the checkpoint is never read into memory."""

    _keys_to_ignore_on_load_unexpected = [r"vision_tower\.", r"multi_modal_projector\."]

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.vision_tower
        del self.model.multi_modal_projector


# transformers finds its renaming of checkpoint keys by the module that a model class comes from.
LlavaLanguageHalf.__module__ = LlavaForConditionalGeneration.__module__


def _decoder(model: PreTrainedModel) -> nn.Module:
    assert isinstance(model, LlavaLanguageHalf)
    decoder: nn.Module = model.model.language_model
    return decoder


LLAVA = LanguageFamily(LlavaLanguageHalf, _decoder)
