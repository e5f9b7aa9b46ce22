"""Helpers for items that are the pixels of one tile or several, (3, height, width) or (num_tiles, 3, height, width),
and the length of sounds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from raylens.encoder.models.family import Division
from raylens.preprocess.schema import ItemTensors


def count_patches(name: str) -> Callable[[PreTrainedConfig, ItemTensors], int]:
    """Returns a function that counts the patches of an item whose pixels are the field `name`. Partial patches do not
    count."""

    def count(config: PreTrainedConfig, item: ItemTensors) -> int:
        size = config.vision_config.patch_size
        patch_height, patch_width = (size, size) if isinstance(size, int) else size
        *tiles, _, height, width = item[name].shape
        return math.prod(tiles) * (height // patch_height) * (width // patch_width)

    return count


def count_rows(name: str, axes: int = 1) -> Callable[[PreTrainedConfig, ItemTensors], int]:
    """Returns a function that counts the patches of an item whose patches are the first axis, or `axes`, of the field
    `name`."""
    return lambda config, item: item[name].shape[:axes].numel()


def joined_tiles(items: Sequence[ItemTensors], name: str) -> tuple[torch.Tensor, list[int]]:
    """Returns the pixels of all items, (num_tiles, 3, height, width), and each item's number of tiles. An item of one
    tile may lack the first axis."""
    tiles = [item[name].reshape(-1, *item[name].shape[-3:]) for item in items]
    return torch.cat(tiles), [len(own) for own in tiles]


def by_tile(pixels: str, *others: str) -> Division:
    """Divides items by their tiles or frames. `pixels`: the field of the tiles, (..., num_tiles, 3, height, width), or
    (3, height, width) for one tile. `others`: fields with the same leading axes."""

    def num_tiles(item: ItemTensors) -> int:
        return math.prod(item[pixels].shape[:-3])

    def take(item: ItemTensors, start: int, stop: int) -> ItemTensors:
        axis = item[pixels].ndim - 4
        return {**item, **{name: item[name].narrow(axis, start, stop - start) for name in (pixels, *others)}}

    return Division(num_units=num_tiles, take=take)


def split_tiles(features: Any, counts: Sequence[int]) -> list[torch.Tensor]:
    """Returns each item's rows of `features`, which are (num_tiles, rows of a tile, size) or a list with one entry a
    tile."""
    stacked = features if isinstance(features, torch.Tensor) else torch.stack(tuple(features))
    return [own.flatten(0, 1) for own in torch.split(stacked, list(counts))]


def count_frames(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of a sound's frames of some 10 ms, without padding."""
    return max(1, sum(int(tensor.sum()) for name, tensor in item.items() if name.endswith("mask")))
