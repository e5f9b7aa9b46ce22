"""Phi-4 multimodal: a picture fills a grid of square crops, padded right or below; padding takes no tokens."""

import functools
import math
from collections.abc import Sequence

from PIL import Image

from raylens.preprocess.field_layout import Batched, Outputs
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    decode_picture,
    image_token,
    int_option,
    replaces_image_token,
)
from raylens.preprocess.schema import InvalidRequestError

# The small view of the whole: 16 x 16 tokens, a token behind each row, one between it and the crops.
_TOKENS_OF_WHOLE = 256 + 16 + 1
# Fewer pixels than this across and the Hugging Face processor gives up.
_NARROWEST = 10


def _shape_of_crops(outputs: Outputs, index: int) -> Sequence[int]:
    """Returns the outputs' own sizes: the view of the whole, and the crops. The rest is padding."""
    side = outputs["image_pixel_values"].shape[-1]
    height, width = outputs["image_sizes"][index].tolist()
    return [1 + height // side * (width // side)]


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    side, patch = processor.image_processor.size["height"], processor.image_processor.patch_size
    rows, cols = _grid(processor, height, width, kwargs)
    full_height, full_width = rows * side, cols * side
    # The Hugging Face processor's steps, for the last bit of a float may decide.
    if full_width / width < full_height / height:
        used_height, used_width = int(height * (full_width / width)), full_width
    else:
        used_height, used_width = full_height, int(width * (full_height / height))
    if min(used_height, used_width) < _NARROWEST:
        raise InvalidRequestError(
            f"a picture of {width}x{height} pixels is too narrow for this model", field="media", code="invalid_image"
        )
    high = _num_tokens_across(used_height, full_height, side, patch)
    wide = _num_tokens_across(used_width, full_width, side, patch)
    return {"num_img_tokens": [_TOKENS_OF_WHOLE + high * wide + high]}


def _num_tokens_across(used: int, full: int, side: int, patch: int) -> int:
    """Returns the tokens of a crop's side: one for every other patch, unless all of the patch is padding."""
    in_crop = side // patch
    num_patches = full // side * in_crop - (full - used) // patch
    return sum(1 for index in range(num_patches) if index % in_crop % 2 == 0)


def _grid(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> tuple[int, int]:
    """Returns the rows and columns of crops. They hold all pixels, or, if that takes too many crops, have the closest
    shape."""
    side, most = processor.image_processor.size["height"], _most_crops(processor, kwargs)
    rows, cols = math.ceil(height / side), math.ceil(width / side)
    if rows * cols <= most:
        return rows, cols
    find_closest = processor.image_processor.find_closest_aspect_ratio
    cols, rows = find_closest(width / height, _shapes(most), width, height, side)
    return rows, cols


@functools.cache
def _shapes(most: int) -> tuple[tuple[int, int], ...]:
    """Returns all (columns, rows) of up to so many crops, made as the Hugging Face processor makes them: if two shapes
    are equally close, their order decides, and for shapes of one area that order is a set's."""
    sides = ((wide, high) for size in range(1, most + 1) for wide in range(1, size + 1) for high in range(1, size + 1))
    return tuple(sorted({shape for shape in sides if shape[0] * shape[1] <= most}, key=math.prod))


def _most_crops(processor: HFProcessor, kwargs: Kwargs) -> int:
    return int(kwargs.get("dynamic_hd") or processor.image_processor.dynamic_hd)


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns every grid that is as wide as its height allows, filled without padding. Padding only takes tokens
    away."""
    side, most = processor.image_processor.size["height"], _most_crops(processor, kwargs)
    return [(rows * side, most // rows * side) for rows in range(1, most + 1)]


def _decode(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> Image.Image:
    picture: Image.Image = decode_picture(processor, content, limits, kwargs)
    _size_outputs(processor, picture.height, picture.width, kwargs)  # refuses what the processor cannot take
    return picture


PHI4_MULTIMODAL = ProcessorFamily(
    processor_class="Phi4MultimodalProcessor",
    modalities={
        "image": Modality(
            fields={
                "image_pixel_values": Batched(_shape_of_crops),
                "image_sizes": Batched(),
                "image_attention_mask": Batched(_shape_of_crops),
            },
            update=replaces_image_token,
            embed_token=image_token,
            derived_fields=("image_attention_mask",),
            size_outputs=_size_outputs,
            largest=_largest,
            decode=_decode,
            options={
                "dynamic_hd": int_option(
                    "dynamic_hd", least=1, most=lambda processor: processor.image_processor.dynamic_hd
                )
            },
        )
    },
    backends=("torchvision",),
)
