"""Idefics3 and SmolVLM: items are tiles or frames, and the model drops a tile whose pixels are all 0 as padding."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import by_tile, count_patches, joined_tiles
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Gives every tile to the model as a sample of its own, so that a tile that the model drops shifts no rows of the
    items behind it."""
    pixels, counts = joined_tiles(items, "pixel_values")
    mask = torch.cat([item["pixel_attention_mask"].reshape(-1, *pixels.shape[-2:]) for item in items])
    tiles = iter(model.get_image_features(pixels[:, None], pixel_attention_mask=mask[:, None]).pooler_output)
    return [torch.cat([next(tiles) for _ in range(count)]) for count in counts]


def _tile_size(item: ItemTensors) -> Hashable:
    """Returns the height and width of an item's tiles. The pixels of a picture are (1, num_tiles, 3, height, width),
    those of a video (num_frames, 3, height, width)."""
    return tuple(item["pixel_values"].shape[-2:])


def _num_units(item: ItemTensors) -> int:
    """Returns the number of tiles, or 1 if one of them is blank: the model drops a blank tile beside others, and keeps
    it alone."""
    tiles = item["pixel_values"].flatten(0, -4)
    # The first row tells of nearly all tiles that they are not blank.
    is_blank = any(not tile[:, 0].any() and not tile.any() for tile in tiles)
    return 1 if is_blank else len(tiles)


_LANGUAGE = ("model.text_model", "lm_head")
_MODALITY = VisionModality(
    encode=_encode,
    num_patches=count_patches("pixel_values"),
    batch_key=_tile_size,
    division=replace(by_tile("pixel_values", "pixel_attention_mask"), num_units=_num_units),
)

IDEFICS3 = VisionFamily(
    whole="Idefics3ForConditionalGeneration",
    unused=_LANGUAGE,
    tower="model.vision_model",
    projector=("model.connector",),
    modalities={"image": _MODALITY},
)
SMOLVLM = VisionFamily(
    whole="SmolVLMForConditionalGeneration",
    unused=_LANGUAGE,
    tower="model.vision_model",
    projector=("model.connector",),
    modalities={"image": _MODALITY, "video": _MODALITY},
)
