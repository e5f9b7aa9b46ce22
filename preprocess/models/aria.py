"""Aria: a picture is padded to a square of 490 or 980 pixels, or, with `split_image`, cut into several squares."""

from raylens.preprocess.field_layout import Outputs, blank_pixels, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    num_crops = processor.image_processor.get_number_of_image_patches(height, width, dict(kwargs))
    side = kwargs["max_image_size"]
    return {"pixel_values": blank_pixels(num_crops, 3, side, side), "num_crops": num_crops}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the sizes that exactly fill a grid of crops. Such a picture gets that grid, because no other grid fits
    without waste."""
    return [(height, width) for height, width in processor.image_processor.split_resolutions]


ARIA = ProcessorFamily(
    processor_class="AriaProcessor",
    modalities={
        "image": Modality(
            fields={"pixel_values": whole, "pixel_mask": whole},
            marks=("<fim_prefix>", "<fim_suffix>"),
            size_outputs=_size_outputs,
            largest=_largest,
        )
    },
)
