"""Gemma 3n: its tower is a convolutional network from timm, an optional dependency (`raylens[gemma3n]`)."""

from dataclasses import replace

from transformers import PreTrainedConfig

from raylens.encoder.models.family import VisionFamily
from raylens.encoder.models.tiles import IMAGE
from raylens.preprocess.schema import ItemTensors

_PATCH_SIZE = 16
"""The side in pixels of one position's square in MobileNetV5's stage with the most layers."""


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    height, width = item["pixel_values"].shape[-2:]
    return -(-height // _PATCH_SIZE) * -(-width // _PATCH_SIZE)


GEMMA3N = VisionFamily(
    whole="Gemma3nForConditionalGeneration",
    unused=(
        "model.language_model",
        "lm_head",
        # In the language half, the next two embed the prompt's own vision tokens, such as the end of a picture.
        "model.embed_vision.embedding",
        "model.embed_vision.hard_embedding_norm",
        "model.audio_tower",
        "model.embed_audio",
    ),
    tower="model.vision_tower",
    projector=("model.embed_vision",),
    modalities={"image": replace(IMAGE, num_patches=_num_patches)},
    has_tiles=True,
)
