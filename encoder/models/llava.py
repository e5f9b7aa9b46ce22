"""LLaVA 1.5: CLIP's patch features of one layer, through the projector."""

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from encoder.models.family import VisionFamily


class LlavaVisionHalf(LlavaForConditionalGeneration):
    """LLaVA with vision tower and projector only; the rest of the checkpoint is never read into memory."""

    _keys_to_ignore_on_load_unexpected = [r"language_model\.", r"^lm_head\."]
    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.language_model
        del self.lm_head


def _encode(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    assert isinstance(model, LlavaVisionHalf)
    features: list[torch.Tensor] = model.get_image_features(pixel_values=batch["pixel_values"]).pooler_output
    return features


LLAVA = VisionFamily(LlavaVisionHalf, _encode)
