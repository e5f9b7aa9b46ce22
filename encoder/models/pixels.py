"""Items that are pixels of one tile or several, (3, height, width) or (num_tiles, 3, height, width)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from preprocess.schema import ItemTensors


def count_patches(name: str) -> Callable[[PreTrainedConfig, ItemTensors], int]:
    """Counts the patches of an item whose pixels are the field `name`. What is left of a side makes no patch."""

    def count(config: PreTrainedConfig, item: ItemTensors) -> int:
        size = config.vision_config.patch_size
        patch_height, patch_width = (size, size) if isinstance(size, int) else size
        *tiles, _, height, width = item[name].shape
        return math.prod(tiles) * (height // patch_height) * (width // patch_width)

    return count


def joined_tiles(items: Sequence[ItemTensors], name: str) -> tuple[torch.Tensor, list[int]]:
    """The pixels of all items, (num_tiles, 3, height, width), and each one's number of tiles. An item of one tile may
    lack the first axis."""
    tiles = [item[name].reshape(-1, *item[name].shape[-3:]) for item in items]
    return torch.cat(tiles), [len(own) for own in tiles]


def split_tiles(features: Any, counts: Sequence[int]) -> list[torch.Tensor]:
    """Each item's rows of features that are (num_tiles, rows of a tile, size), or a list of those."""
    stacked = features if isinstance(features, torch.Tensor) else torch.stack(tuple(features))
    return [own.flatten(0, 1) for own in torch.split(stacked, list(counts))]
