"""Mllama. The tower encodes all tiles of a picture together, those of padding among them."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """`pixel_values` of an item: (1, 1, max_num_tiles, channels, height, width)."""
    inputs = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    features = model.model.vision_model(**inputs).last_hidden_state
    return list(model.model.multi_modal_projector(features).flatten(1, -2))


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    pixels = item["pixel_values"]
    return int(pixels.numel() // (pixels.shape[-3] * config.vision_config.patch_size**2))


MLLAMA = VisionFamily(
    whole="MllamaForConditionalGeneration",
    tower="model.vision_model",
    modalities={"image": VisionModality(encode=_encode, num_patches=_num_patches)},
)
