"""LLaVA 1.5: CLIP's patch features of one layer, through the projector."""

from collections.abc import Sequence

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedConfig, PreTrainedModel

from encoder.models.family import VisionFamily, VisionModality
from modeling.half_model import without
from preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels = torch.stack([item["pixel_values"] for item in items])
    return list(model.get_image_features(pixel_values=pixels).pooler_output)


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    height, width = item["pixel_values"].shape[-2:]
    return int(height * width // config.vision_config.patch_size**2)


LLAVA = VisionFamily(
    model_class=without(LlavaForConditionalGeneration, "model.language_model", "lm_head"),
    projector=("model.multi_modal_projector",),
    modalities={"image": VisionModality(encode=_encode, num_patches=_num_patches)},
)
