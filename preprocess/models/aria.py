"""Aria: a picture is padded to a square of 490 or 980 pixels, or, with `split_image`, cut into several squares."""

from collections.abc import Sequence
from typing import Any

import torch

from raylens.preprocess.field_layout import Flat, Outputs
from raylens.preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    blank_pixels,
    image_token,
    replace_image_token,
    replaces_image_token,
    run_images,
)


def _run(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """Processes pictures one by one. For a batch, Hugging Face's processor returns a single number of crops, the
    largest picture's."""
    alone = [run_images(processor, [image], kwargs) for image in images]
    joined: dict[str, Any] = {name: torch.cat([one[name] for one in alone]) for name in ("pixel_values", "pixel_mask")}
    return {**joined, "num_crops": [len(one["pixel_values"]) for one in alone]}


def _expansion(processor: HFProcessor, outputs: Outputs, index: int, kwargs: Kwargs) -> str:
    return replace_image_token(processor, {**outputs, "num_crops": outputs["num_crops"][index]}, index, kwargs)


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    num_crops = processor.image_processor.get_number_of_image_patches(height, width, dict(kwargs))
    side = kwargs["max_image_size"]
    return {"pixel_values": blank_pixels(num_crops, 3, side, side), "num_crops": [num_crops]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the sizes that exactly fill a grid of crops. Such a picture gets that grid, because no other grid fits
    without waste."""
    return [(height, width) for height, width in processor.image_processor.split_resolutions]


_CROPS = Flat(lambda outputs: outputs["num_crops"])

ARIA = ProcessorFamily(
    processor_class="AriaProcessor",
    modalities={
        "image": Modality(
            fields={"pixel_values": _CROPS, "pixel_mask": _CROPS},
            update=replaces_image_token,
            embed_token=image_token,
            marks=("<fim_prefix>", "<fim_suffix>"),
            size_outputs=_size_outputs,
            largest=_largest,
            run=_run,
            expansion=_expansion,
        )
    },
)
