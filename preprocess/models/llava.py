"""LLaVA 1.5: every picture is resized to one size and takes a fixed number of positions."""

from dataclasses import replace

from raylens.preprocess.field_layout import Outputs
from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, Kwargs, ProcessorFamily, blank_pixels


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    crop = processor.image_processor.crop_size
    return {"pixel_values": blank_pixels(1, 3, crop["height"], crop["width"])}


LLAVA = ProcessorFamily(
    processor_class="LlavaProcessor",
    modalities={"image": replace(FIXED_IMAGE, size_outputs=_size_outputs)},
)
