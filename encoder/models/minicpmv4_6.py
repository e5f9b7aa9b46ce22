"""MiniCPM-V 4.6 and later: an item has tiles of any shape, with all patches side by side on the last axis."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import Division, VisionFamily, VisionModality, all_together
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels = torch.cat([item["pixel_values"] for item in items], dim=-1)
    sizes = torch.cat([item["target_sizes"] for item in items])
    tiles = iter(model.get_image_features(pixels, target_sizes=sizes).pooler_output)
    return [torch.cat([next(tiles) for _ in item["target_sizes"]]) for item in items]


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    return int(item["target_sizes"].prod(-1).sum())


def _take(item: ItemTensors, start: int, stop: int) -> ItemTensors:
    """Returns the tiles [start, stop). A patch takes as many columns of the pixels as its width."""
    pixels, sizes = item["pixel_values"], item["target_sizes"]
    before, own = (int(tiles.prod(-1).sum()) * pixels.shape[-2] for tiles in (sizes[:start], sizes[start:stop]))
    return {**item, "pixel_values": pixels.narrow(-1, before, own), "target_sizes": sizes[start:stop]}


MINICPMV4_6 = VisionFamily(
    whole="MiniCPMV4_6ForConditionalGeneration",
    projector=("model.merger",),
    modalities={
        "image": VisionModality(
            encode=_encode,
            num_patches=_num_patches,
            batch_key=all_together,
            on_host=frozenset({"target_sizes"}),
            division=Division(num_units=lambda item: len(item["target_sizes"]), take=_take),
        )
    },
    is_packed=True,
)
MINICPMV4_7 = replace(MINICPMV4_6, whole="MiniCPMV4_7ForConditionalGeneration")
MINICPM_OCR = replace(MINICPMV4_6, whole="MiniCPMOcrForConditionalGeneration")
