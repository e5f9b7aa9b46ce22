"""LLaVA-NeXT and LLaVA-OneVision: a small view of the whole picture, then tiles on the grid nearest its shape.
OneVision cuts only the single picture of a prompt into tiles."""

import math
from dataclasses import replace

from PIL import Image

from raylens.preprocess.field_layout import Outputs, blank_pixels, first_row
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, run_image, run_unpadded
from raylens.preprocess.models.video import FIXED_FRAMES


def _tile(processor: HFProcessor) -> tuple[int, int]:
    """Returns height and width of a tile in the encoder's input."""
    images = processor.image_processor
    size = images.crop_size if images.do_center_crop else images.size
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    return size["height"], size["width"]


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    pixels = blank_pixels(1, 1, 3, *_tile(processor))
    return {"pixel_values": pixels, "image_sizes": [[height, width]], "batch_num_images": [1]}


def _grids(processor: HFProcessor, kwargs: Kwargs) -> list[tuple[int, int]]:
    """Returns the sizes that exactly fill a grid. Such a picture gets that grid, because no other grid fits without
    waste. Any other picture in the same grid has rows or columns of padding, which take no tokens."""
    return [(height, width) for height, width in processor.image_processor.image_grid_pinpoints]


_NEXT = Modality(
    fields={"pixel_values": first_row, "image_sizes": first_row},
    size_outputs=_size_outputs,
    largest=_grids,
    run=run_unpadded,
)


def _largest_onevision(processor: HFProcessor, kwargs: Kwargs) -> list[tuple[int, int]]:
    """Returns the best of the sizes with every possible number of token rows, or columns, left by padding in each grid.

    A grid is scaled down to the tokens that `vision_aspect_ratio` allows only if it has at least 1.21 times as many.
    Padding may reduce a grid to just below that bound, which then keeps more tokens than a full grid.

    One size is enough for each number: the largest one with this number that fills the grid's other side. If this
    picture gets another grid, so does every other picture with this number: a picture gets the smallest grid that shows
    all its pixels, and a smaller grid that shows a picture of this size also shows a narrower one."""
    tile = _tile(processor)
    tile_tokens = math.isqrt(processor.num_image_tokens)  # along a side

    def padded(pixels: int, tile_pixels: int) -> set[int]:
        """Returns the most pixels for each number of tokens left of a grid's side. Padding removes the same number of
        tokens at both ends."""
        tokens = pixels // tile_pixels * tile_tokens
        return {min(pixels, math.ceil((left + 1) * pixels / tokens) - 1) for left in range(tokens, 0, -2)}

    sizes: set[tuple[int, int]] = set()
    for height, width in _grids(processor, kwargs):
        sizes |= {(part, width) for part in padded(height, tile[0])}
        sizes |= {(height, part) for part in padded(width, tile[1])}
    # Compared here, because `expansion` would be too slow for thousands of sizes.
    return [max(sizes, key=lambda size: processor._get_number_of_features(*size, *tile))]


def _run_untiled(processor: HFProcessor, image: Image.Image, kwargs: Kwargs) -> Outputs:
    """Adds a tiny picture, so that the processor sees several. The model distinguishes only 1 and more pictures, so
    such an item can be reused in all prompts with more than one."""
    return run_image(processor, [image, Image.new("RGB", (8, 8))], kwargs)


_UNTILED = replace(
    _NEXT,
    fields={**_NEXT.fields, "batch_num_images": first_row},
    size_outputs=lambda processor, height, width, kwargs: {"batch_num_images": [2]},
    run=_run_untiled,
)

_ONEVISION = replace(
    _NEXT,
    fields={**_NEXT.fields, "batch_num_images": first_row},
    largest=_largest_onevision,
    among_others=_UNTILED,
)

LLAVA_NEXT = ProcessorFamily(processor_class="LlavaNextProcessor", modalities={"image": _NEXT})
LLAVA_ONEVISION = ProcessorFamily(
    processor_class="LlavaOnevisionProcessor", modalities={"image": _ONEVISION, "video": FIXED_FRAMES}
)
