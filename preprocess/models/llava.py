"""LLaVA 1.5: every picture is resized to one size and takes a fixed number of positions."""

from preprocess.field_layout import Batched, Outputs
from preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    any_size,
    blank_pixels,
    fixed_side,
    image_token,
    replaces_image_token,
)


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    crop = processor.image_processor.crop_size
    return {"pixel_values": blank_pixels(1, 3, crop["height"], crop["width"])}


LLAVA = ProcessorFamily(
    processor_class="LlavaProcessor",
    modalities={
        "image": Modality(
            fields={"pixel_values": Batched()},
            update=replaces_image_token,
            embed_token=image_token,
            size_outputs=_size_outputs,
            largest=any_size,
            fixed_side=fixed_side,
        )
    },
)
