"""Gemma 3: a fixed number of tokens for each view. The first view is the whole picture; pan and scan adds crops."""

import math

import torch

from raylens.preprocess.field_layout import Flat, Outputs
from raylens.preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    flag,
    image_token,
    int_option,
    replaces_image_token,
)


def _num_views(outputs: Outputs) -> torch.Tensor:
    return torch.as_tensor(outputs["num_crops"]) + 1


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"num_crops": [_num_crops(height, width, kwargs) if kwargs["do_pan_and_scan"] else 0]}


def _num_crops(height: int, width: int, kwargs: Kwargs) -> int:
    """Returns the number of crops along the longer side, about the number that makes crops closest to squares."""
    long, short = max(height, width), min(height, width)
    smallest = kwargs["pan_and_scan_min_crop_size"]
    if long / short < kwargs["pan_and_scan_min_ratio_to_activate"]:
        return 0
    wanted = max(2, min(long // smallest, math.floor(long / short + 0.5)))
    number = min(kwargs["pan_and_scan_max_num_crops"], wanted)
    return 0 if min(math.ceil(long / number), short) < smallest else number


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns a size with the most crops: crops of the smallest size, side by side."""
    side = kwargs["pan_and_scan_min_crop_size"]
    ratio = max(kwargs["pan_and_scan_max_num_crops"], math.ceil(kwargs["pan_and_scan_min_ratio_to_activate"]))
    return [(side, side * ratio)]


GEMMA3 = ProcessorFamily(
    processor_class="Gemma3Processor",
    modalities={
        "image": Modality(
            fields={"pixel_values": Flat(_num_views)},
            # The processor's image token starts an item's tokens; the tokenizer's image token repeats within.
            update=replaces_image_token,
            embed_token=lambda processor: image_token(processor.tokenizer),
            size_outputs=_size_outputs,
            largest=_largest,
            largest_options={"do_pan_and_scan": True},
            options={
                "do_pan_and_scan": flag("do_pan_and_scan"),
                "pan_and_scan_max_num_crops": int_option(
                    "pan_and_scan_max_num_crops",
                    least=1,
                    most=lambda processor: processor.images_kwargs["pan_and_scan_max_num_crops"],
                ),
            },
        )
    },
)
