"""Families whose pictures are one square or several, each through the tower alone and each with as many embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AriaForConditionalGeneration,
    Blip2ForConditionalGeneration,
    DeepseekVLForConditionalGeneration,
    Gemma3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    JanusForConditionalGeneration,
    LlavaForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from encoder.models.family import VisionFamily, VisionModality
from modeling.half_model import without
from preprocess.schema import ItemTensors


def pixel_patches(config: PreTrainedConfig, pixels: torch.Tensor) -> int:
    """Patches of pixels (..., 3, height, width)."""
    size = config.vision_config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(pixels[..., 0, ::height, ::width].numel())


def joined_tiles(items: Sequence[ItemTensors], name: str) -> tuple[torch.Tensor, list[int]]:
    """The pixels of all items, (num_tiles, 3, height, width), and each one's number of tiles. An item of one tile may
    lack the first axis."""
    tiles = [item[name].reshape(-1, *item[name].shape[-3:]) for item in items]
    return torch.cat(tiles), [len(own) for own in tiles]


def split_tiles(features: Any, counts: Sequence[int]) -> list[torch.Tensor]:
    """Each item's rows of features that are (num_tiles, rows of a tile, size), or a list of those."""
    stacked = features if isinstance(features, torch.Tensor) else torch.stack(tuple(features))
    return [own.flatten(0, 1) for own in torch.split(stacked, list(counts))]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Items whose pixels are the field `name`."""

    name: str = "pixel_values"

    def encode(self, model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        pixels, counts = joined_tiles(items, self.name)
        return split_tiles(model.base_model.get_image_features(pixel_values=pixels).pooler_output, counts)

    def num_patches(self, config: PreTrainedConfig, item: ItemTensors) -> int:
        return pixel_patches(config, item[self.name])


def _modality(tiles: _Tiles) -> VisionModality:
    return VisionModality(encode=tiles.encode, num_patches=tiles.num_patches)


def _encode_masked(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Aria's tiles have a mask of what is padding, (num_tiles, height, width)."""
    pixels, counts = joined_tiles(items, "pixel_values")
    mask = torch.cat([item["pixel_mask"] for item in items])
    return split_tiles(model.base_model.get_image_features(pixel_values=pixels, pixel_mask=mask).pooler_output, counts)


_IMAGE = _modality(_Tiles())
_LANGUAGE = ("model.language_model", "lm_head")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")

ARIA = VisionFamily(
    model_class=without(AriaForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": VisionModality(encode=_encode_masked, num_patches=_Tiles().num_patches)},
)
BLIP_2 = VisionFamily(
    model_class=without(Blip2ForConditionalGeneration, "language_model"),
    tower="vision_model",
    projector=("query_tokens", "qformer", "language_projection"),
    modalities={"image": _IMAGE},
)
DEEPSEEK_VL = VisionFamily(
    model_class=without(DeepseekVLForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_model",
    projector=("model.aligner",),
    modalities={"image": _IMAGE},
)
GEMMA3 = VisionFamily(
    model_class=without(Gemma3ForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": _IMAGE},
)
INTERNVL = VisionFamily(
    model_class=without(InternVLForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    # A frame is a tile.
    modalities={"image": _IMAGE, "video": _modality(_Tiles("pixel_values_videos"))},
)
JANUS = VisionFamily(
    model_class=without(JanusForConditionalGeneration, *_LANGUAGE, *_GENERATION),
    tower="model.vision_model",
    projector=("model.aligner",),
    modalities={"image": _IMAGE},
)
LLAVA = VisionFamily(
    model_class=without(LlavaForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": _IMAGE},
)
PALIGEMMA = VisionFamily(
    model_class=without(PaliGemmaForConditionalGeneration, *_LANGUAGE),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": _IMAGE},
)
