"""Phi-4 multimodal: a picture fills a grid of square crops, padded at the right or bottom; padding takes no tokens."""

import functools
import math

from PIL import Image

from raylens.preprocess.field_layout import Outputs, first_row
from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, bounded
from raylens.preprocess.schema import invalid_media

# The small view of the whole: 16 x 16 tokens, a token after each row, and one between it and the crops.
_TOKENS_OF_WHOLE = 256 + 16 + 1
# The Hugging Face processor fails for pictures with fewer pixels across.
_NARROWEST = 10


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    side, patch = processor.image_processor.size["height"], processor.image_processor.patch_size
    rows, cols = _grid(processor, height, width, kwargs)
    full_height, full_width = rows * side, cols * side
    # The same steps as in the Hugging Face processor, because the last bit of a float may decide.
    if full_width / width < full_height / height:
        used_height, used_width = int(height * (full_width / width)), full_width
    else:
        used_height, used_width = full_height, int(width * (full_height / height))
    if min(used_height, used_width) < _NARROWEST:
        raise invalid_media(f"a picture of {width}x{height} pixels is too narrow for this model", "invalid_image")
    high = _num_tokens_across(used_height, full_height, side, patch)
    wide = _num_tokens_across(used_width, full_width, side, patch)
    return {"num_img_tokens": [_TOKENS_OF_WHOLE + high * wide + high]}


def _num_tokens_across(used: int, full: int, side: int, patch: int) -> int:
    """Returns the number of tokens along a side: one for every other patch that is not all padding."""
    in_crop = side // patch
    num_patches = full // side * in_crop - (full - used) // patch
    return sum(1 for index in range(num_patches) if index % in_crop % 2 == 0)


def _grid(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> tuple[int, int]:
    """Returns the rows and columns of crops: the grid that holds all pixels, or, if that has too many crops, the grid
    of the closest shape."""
    side, most = processor.image_processor.size["height"], _most_crops(processor, kwargs)
    rows, cols = math.ceil(height / side), math.ceil(width / side)
    if rows * cols <= most:
        return rows, cols
    find_closest = processor.image_processor.find_closest_aspect_ratio
    cols, rows = find_closest(width / height, _shapes(most), width, height, side)
    return rows, cols


@functools.cache
def _shapes(most: int) -> tuple[tuple[int, int], ...]:
    """Returns all (columns, rows) of up to so many crops, in the Hugging Face processor's order: the order decides
    between equally close shapes, and for shapes of one area it is the order of a set."""
    sides = ((wide, high) for size in range(1, most + 1) for wide in range(1, size + 1) for high in range(1, size + 1))
    return tuple(sorted({shape for shape in sides if shape[0] * shape[1] <= most}, key=math.prod))


def _most_crops(processor: HFProcessor, kwargs: Kwargs) -> int:
    return int(kwargs.get("dynamic_hd") or processor.image_processor.dynamic_hd)


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the sizes that exactly fill the widest grid of each height. Padding only removes tokens."""
    side, most = processor.image_processor.size["height"], _most_crops(processor, kwargs)
    return [(rows * side, most // rows * side) for rows in range(1, most + 1)]


def _decode(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> Image.Image:
    picture = decode_image(content, limits)
    _size_outputs(processor, picture.height, picture.width, kwargs)  # raises for sizes that the processor fails on
    return picture


PHI4_MULTIMODAL = ProcessorFamily(
    processor_class="Phi4MultimodalProcessor",
    modalities={
        "image": Modality(
            fields={"image_pixel_values": first_row, "image_sizes": first_row, "image_attention_mask": first_row},
            derived_fields=("image_attention_mask",),
            size_outputs=_size_outputs,
            largest=_largest,
            decode=_decode,
            options=bounded("dynamic_hd"),
        )
    },
    backends=("torchvision",),
)
