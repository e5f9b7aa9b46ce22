"""LLaVA-NeXT and LLaVA-OneVision: a small view of the whole picture, then tiles on the grid nearest its shape.
OneVision cuts only the single picture of a prompt into tiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from raylens.preprocess.field_layout import Batched, Outputs
from raylens.preprocess.models.family import (
    RAGGED,
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    blank_pixels,
    image_token,
    replaces_image_token,
    run_images,
    run_ragged_images,
)
from raylens.preprocess.models.video import FIXED_FRAMES


def _tile(processor: HFProcessor) -> Size:
    """Returns height and width of a tile in the encoder's input."""
    images = processor.image_processor
    size = images.crop_size if images.do_center_crop else images.size
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    return size["height"], size["width"]


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    pixels = blank_pixels(1, 1, 3, *_tile(processor))
    return {"pixel_values": pixels, "image_sizes": [[height, width]], "batch_num_images": [1]}


def _grids(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the sizes that exactly fill a grid. Such a picture gets that grid, because no other grid fits without
    waste. Any other picture in the same grid has rows or columns of padding, which take no tokens."""
    return [(height, width) for height, width in processor.image_processor.image_grid_pinpoints]


_NEXT = Modality(
    fields={"pixel_values": RAGGED, "image_sizes": Batched()},
    update=replaces_image_token,
    embed_token=image_token,
    size_outputs=_size_outputs,
    largest=_grids,
    run=run_ragged_images,
)


def _largest_onevision(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the best of the sizes with every possible number of token rows, or columns, left by padding in each grid.

    A grid is scaled down to the tokens that `vision_aspect_ratio` allows only if it has at least 1.21 times as many.
    Padding may reduce a grid to just below that bound, which then keeps more tokens than a full grid.

    One size is enough for each number: the largest one with this number that fills the grid's other side. If this
    picture gets another grid, so does every other picture with this number: a picture gets the smallest grid that shows
    all its pixels, and a smaller grid that shows a picture of this size also shows a narrower one.
    """
    tile = _tile(processor)
    tile_tokens = math.isqrt(processor.num_image_tokens)  # along a side

    def padded(pixels: int, tile_pixels: int) -> set[int]:
        """Returns the most pixels for each number of tokens left of a grid's side. Padding removes the same number of
        tokens at both ends."""
        tokens = pixels // tile_pixels * tile_tokens
        return {min(pixels, math.ceil((left + 1) * pixels / tokens) - 1) for left in range(tokens, 0, -2)}

    sizes: set[Size] = set()
    for height, width in _grids(processor, kwargs):
        sizes |= {(part, width) for part in padded(height, tile[0])}
        sizes |= {(height, part) for part in padded(width, tile[1])}
    # Compared here, because `expansion` would be too slow for thousands of sizes.
    return [max(sizes, key=lambda size: processor._get_number_of_features(*size, *tile))]


@dataclass(frozen=True, slots=True)
class NumTogether:
    """The number of pictures in the prompt. The model distinguishes only 1 and more, so an item has 2 for any number
    above 1 and can be reused in all such prompts."""

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        return [torch.tensor(2)] * num_items


def _run_untiled(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """Adds a tiny picture, so that the processor sees several even if the others are cached."""
    return run_images(processor, [[*images, Image.new("RGB", (8, 8))]], kwargs)


_UNTILED = Modality(
    fields={"pixel_values": Batched(), "image_sizes": Batched(), "batch_num_images": NumTogether()},
    update=replaces_image_token,
    embed_token=image_token,
    size_outputs=lambda processor, height, width, kwargs: {"batch_num_images": [2]},
    largest=_grids,
    run=_run_untiled,
)

_ONEVISION = replace(
    _NEXT,
    fields={**_NEXT.fields, "batch_num_images": Batched()},
    largest=_largest_onevision,
    among_others=_UNTILED,
)

LLAVA_NEXT = ProcessorFamily(processor_class="LlavaNextProcessor", modalities={"image": _NEXT})
LLAVA_ONEVISION = ProcessorFamily(
    processor_class="LlavaOnevisionProcessor", modalities={"image": _ONEVISION, "video": FIXED_FRAMES}
)
