"""MiniCPM-V 4.6 and later: a view of the whole picture and slices of it, each of its own shape and with a number."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, bounded

_MAX_RATIO = 100  # of a picture's sides, the default of our limits


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    grid, tiles = _tiles(processor, height, width, kwargs)
    patch = processor.image_processor.patch_size
    sizes = torch.tensor(tiles, dtype=torch.int32) // patch
    return {"grids": [grid], "num_patches_per_image": [len(tiles)], "target_sizes": sizes}


def _tiles(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the grid of slices, (0, 0) for none, and each tile's height and width in pixels. The first tile is the
    whole picture."""
    part = processor.image_processor
    settings = part.scale_resolution, part.patch_size, part.downsample_mode
    size, most = (height, width), _most_slices(processor, kwargs)
    grid = part.get_sliced_grid(size, most, part.scale_resolution) if part.slice_mode else None
    view = part.find_best_resize(size, *settings, allow_upscale=grid is None)
    if grid is None:
        return [0, 0], [view]
    rows, cols = grid
    high, wide = part.get_refine_size(size, grid, *settings, allow_upscale=True)
    return [rows, cols], [view, *[(high // rows, wide // cols)] * (rows * cols)]


def _most_slices(processor: HFProcessor, kwargs: Kwargs) -> int:
    return int(kwargs.get("max_slice_nums", processor.image_processor.max_slice_nums))


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[tuple[int, int]]:
    """Returns the largest of the sizes at which some tile gets one more row or column of tokens."""

    def num_pixels(size: tuple[int, int]) -> int:
        return sum(high * wide for high, wide in _tiles(processor, *size, kwargs)[1])

    return [max(_turning_sizes(processor, _most_slices(processor, kwargs)), key=num_pixels)]


def _turning_sizes(processor: HFProcessor, most: int) -> Iterator[tuple[int, int]]:
    """Yields sizes for each turning shape: one for each number of slices, and a large one. All tiles have about the
    same area, so their shape decides the number of tokens. A tile has the shape of the picture or of a slice."""
    for shape in _turning_shapes(processor, most):
        for num_slices in (*range(1, most + 1), 40 * most):
            height = int(processor.image_processor.scale_resolution * math.sqrt(num_slices / shape))
            width = int(height * shape)
            if 0 < max(height, width) <= _MAX_RATIO * min(height, width):
                yield height, width


def _turning_shapes(processor: HFProcessor, most: int) -> set[float]:
    """Returns the shapes of pictures, as width / height, at which a tile gets one more row or column of tokens."""
    part = processor.image_processor
    token = part.patch_size * (2 if part.downsample_mode == "4x" else 4)
    num_sides = int(part.scale_resolution * math.sqrt(_MAX_RATIO)) // token + 1
    # A side is rounded to whole tokens, exact halves to even: test both sides of each bound.
    sides = [token * number + token // 2 + more for number in range(num_sides) for more in (0, 1)]
    tiles = [(side / part.scale_resolution) ** power for side in sides for power in (2, -2)]
    grids = [cols / rows for rows in range(1, most + 1) for cols in range(1, most // rows + 1)]
    shapes = {tile * grid for tile in tiles for grid in grids}
    return {shape for shape in shapes if 1 / _MAX_RATIO <= shape <= _MAX_RATIO}


def _expansion(processor: HFProcessor, outputs: Outputs, kwargs: Kwargs) -> str:
    divisor = processor.image_token_divisor
    return str(processor.replace_image_token(outputs, image_idx=0, image_token_divisor=divisor))


def _ordinal(processor: HFProcessor, index: int) -> str:
    if not processor.image_processor.use_image_id:
        return ""
    return f"{processor.image_id_start_token}{index}{processor.image_id_end_token}"


_IMAGE = Modality(
    fields={"pixel_values": whole, "target_sizes": whole},
    size_outputs=_size_outputs,
    largest=_largest,
    expansion=_expansion,
    ordinal=_ordinal,
    options=bounded("max_slice_nums"),
)

MINICPMV4_6 = ProcessorFamily(
    processor_class="MiniCPMV4_6Processor",
    modalities={"image": _IMAGE},
    # The processor needs its video processor, which needs torchvision.
    backends=("torchvision",),
)
MINICPMV4_7 = replace(
    MINICPMV4_6,
    processor_class="MiniCPMV4_7Processor",
    modalities={"image": replace(_IMAGE, language_fields=("target_sizes",))},
)
MINICPM_OCR = replace(MINICPMV4_6, processor_class="MiniCPMOcrProcessor")
