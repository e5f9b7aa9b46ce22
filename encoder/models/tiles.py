"""Families whose pictures are one or several tiles of one size. The tower encodes tiles independently, and every tile
has the same number of embeddings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import by_tile, count_patches, joined_tiles, split_tiles
from raylens.preprocess.schema import ItemTensors


def _tiles(name: str) -> VisionModality:
    """Returns the modality of items whose pixels are the field `name`."""

    def encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        pixels, counts = joined_tiles(items, name)
        return split_tiles(model.base_model.get_image_features(pixel_values=pixels).pooler_output, counts)

    return VisionModality(encode=encode, num_patches=count_patches(name), division=by_tile(name))


def _encode_masked(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes Aria's items, whose tiles have a mask of padding, (num_tiles, height, width)."""
    pixels, counts = joined_tiles(items, "pixel_values")
    mask = torch.cat([item["pixel_mask"] for item in items])
    return split_tiles(model.base_model.get_image_features(pixel_values=pixels, pixel_mask=mask).pooler_output, counts)


def _florence2_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of patches of the tower's stage with the most layers. Each stage cuts the previous stage's
    output into larger patches, which overlap and, by padding, extend beyond the edge."""
    vision = config.vision_config
    sides = list(item["pixel_values"].shape[-2:])
    for stage in range(vision.depths.index(max(vision.depths)) + 1):
        margin = 2 * vision.patch_padding[stage] - vision.patch_size[stage]
        sides = [(side + margin) // vision.patch_stride[stage] + 1 for side in sides]
    return math.prod(sides)


IMAGE = _tiles("pixel_values")
_tile_family = partial(VisionFamily, modalities={"image": IMAGE}, has_tiles=True)
_LANGUAGE = ("model.language_model", "lm_head")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")

ARIA = VisionFamily(
    whole="AriaForConditionalGeneration",
    modalities={"image": replace(IMAGE, encode=_encode_masked, division=by_tile("pixel_values", "pixel_mask"))},
)
BLIP_2 = _tile_family(
    whole="Blip2ForConditionalGeneration",
    unused=("language_model",),
    tower="vision_model",
    projector=("query_tokens", "qformer", "language_projection"),
)
COLPALI = _tile_family(
    whole="ColPaliForRetrieval",
    unused=("vlm.language_model", "embedding_proj_layer"),
    tower="vlm.vision_tower",
    projector=("vlm.multi_modal_projector",),
    modalities={"image": replace(IMAGE, num_patches=lambda config, item: IMAGE.num_patches(config.vlm_config, item))},
)
DEEPSEEK_VL = _tile_family(
    whole="DeepseekVLForConditionalGeneration", tower="model.vision_model", projector=("model.aligner",)
)
FLORENCE2 = _tile_family(
    whole="Florence2ForConditionalGeneration", modalities={"image": replace(IMAGE, num_patches=_florence2_patches)}
)
GEMMA3 = _tile_family(whole="Gemma3ForConditionalGeneration")
# A frame of a video is a tile.
INTERNVL = _tile_family(
    whole="InternVLForConditionalGeneration", modalities={"image": IMAGE, "video": _tiles("pixel_values_videos")}
)
JANUS = _tile_family(
    whole="JanusForConditionalGeneration",
    unused=(*_LANGUAGE, *_GENERATION),
    tower="model.vision_model",
    projector=("model.aligner",),
)
LLAVA = _tile_family(whole="LlavaForConditionalGeneration")
PALIGEMMA = _tile_family(whole="PaliGemmaForConditionalGeneration")
VIPLLAVA = _tile_family(whole="VipLlavaForConditionalGeneration")
