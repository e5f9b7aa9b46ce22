"""Gemma 3: a fixed number of tokens for each view. The first view is the whole picture; pan and scan adds crops."""

import math

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, bounded
from raylens.preprocess.schema import invalid_option

_MAX_CROPS = "pan_and_scan_max_num_crops"


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"num_crops": [_num_crops(height, width, kwargs) if kwargs["do_pan_and_scan"] else 0]}


def _num_crops(height: int, width: int, kwargs: Kwargs) -> int:
    """Returns the number of crops along the longer side, about the number that makes crops closest to squares."""
    long, short = max(height, width), min(height, width)
    smallest = kwargs["pan_and_scan_min_crop_size"]
    if long / short < kwargs["pan_and_scan_min_ratio_to_activate"]:
        return 0
    wanted = max(2, min(long // smallest, math.floor(long / short + 0.5)))
    number = min(kwargs[_MAX_CROPS], wanted)
    return 0 if min(math.ceil(long / number), short) < smallest else number


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[tuple[int, int]]:
    """Returns a size with the most crops: crops of the smallest size, side by side."""
    side = kwargs["pan_and_scan_min_crop_size"]
    ratio = max(kwargs[_MAX_CROPS], math.ceil(kwargs["pan_and_scan_min_ratio_to_activate"]))
    return [(side, side * ratio)]


def _pan_and_scan(processor: HFProcessor, value: object) -> Kwargs:
    if not isinstance(value, bool):
        raise invalid_option("do_pan_and_scan", "must be true or false")
    return {"do_pan_and_scan": value}


GEMMA3 = ProcessorFamily(
    processor_class="Gemma3Processor",
    modalities={
        "image": Modality(
            fields={"pixel_values": whole},
            # The processor's image token starts an item's tokens; the tokenizer's image token repeats within.
            embed_token=lambda processor: processor.tokenizer.image_token,
            size_outputs=_size_outputs,
            largest=_largest,
            largest_options={"do_pan_and_scan": True},
            options={
                "do_pan_and_scan": _pan_and_scan,
                **bounded(_MAX_CROPS, bounds=lambda processor: (1, processor.images_kwargs[_MAX_CROPS])),
            },
        )
    },
)
