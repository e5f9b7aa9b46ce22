"""Idefics3 and SmolVLM: items are tiles or frames. The model treats a tile of zeros as padding and drops it."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import by_tile, count_patches, joined_tiles
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Passes every tile to the model as a separate sample, so that a dropped tile does not shift the rows of later
    items."""
    pixels, counts = joined_tiles(items, "pixel_values")
    mask = torch.cat([item["pixel_attention_mask"].reshape(-1, *pixels.shape[-2:]) for item in items])
    tiles = iter(model.get_image_features(pixels[:, None], pixel_attention_mask=mask[:, None]).pooler_output)
    return [torch.cat([next(tiles) for _ in range(count)]) for count in counts]


def _tile_size(item: ItemTensors) -> Hashable:
    """Returns the height and width of an item's tiles. Pixels are (1, num_tiles, 3, height, width) for a picture and
    (num_frames, 3, height, width) for a video."""
    return tuple(item["pixel_values"].shape[-2:])


def _num_units(item: ItemTensors) -> int:
    """Returns the number of tiles, or 1 if one of them is blank, because the model drops a blank tile only beside other
    tiles."""
    tiles = item["pixel_values"].flatten(0, -4)
    # The first row suffices for nearly all tiles.
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
