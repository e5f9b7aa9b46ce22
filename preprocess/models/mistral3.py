"""Mistral Small 3.1 and later, with Pixtral's processor: pictures keep their shape; a mark ends each row of tokens."""

from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from raylens.preprocess.field_layout import Outputs, blank_pixels, first_row
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, run_unpadded


def _longest_edge(processor: HFProcessor, kwargs: Kwargs) -> int:
    size = kwargs.get("size") or processor.image_processor.size
    return int(size["longest_edge"])


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    square = processor.patch_size * processor.spatial_merge_size
    pixels = blank_pixels(3, height, width)
    resized = get_resize_output_image_size(pixels, _longest_edge(processor, kwargs), square, ChannelDimension.FIRST)
    return {"image_sizes": [resized]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the square of the longest side, which has the most rows and columns: no side exceeds the limit, and
    pictures are never enlarged."""
    longest = _longest_edge(processor, kwargs)
    return [(longest, longest)]


MISTRAL3 = ProcessorFamily(
    processor_class="PixtralProcessor",
    modalities={
        "image": Modality(
            fields={"pixel_values": first_row, "image_sizes": first_row},
            size_outputs=_size_outputs,
            largest=_largest,
            run=run_unpadded,
        )
    },
    backends=("torchvision",),
)
