"""A model family's declaration for the encoder, with the defaults that fit most families."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.modeling.half_model import HalfModel
from raylens.preprocess.schema import ItemTensors


def row_shapes(item: ItemTensors) -> Hashable:
    """Returns the names of an item's tensors and their shapes without the first axis.

    The first axis is the one on which items are concatenated."""
    return tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(item.items()))


def all_together(item: ItemTensors) -> Hashable:
    """Returns the same key for every item: any item may be encoded together with any other."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How an item is divided into stretches of units, such as frames or tiles, that the tower and the projector encode
    independently of each other.

    `num_units(item)`: returns the number of units. An item of one unit is not divided.
    `take(item, start, stop)`: returns the units from `start` up to `stop` as an item of the same `batch_key`. Its
    tensors may be views.
    `join(stretches)`: returns the item's embeddings, given those of consecutive stretches, each (num_embeds,
    embedding_size).
    """

    num_units: Callable[[ItemTensors], int]
    take: Callable[[ItemTensors, int, int], ItemTensors]
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModality:
    """How items of one kind are encoded. An item is a dictionary of tensors, as Preprocess makes it.

    `encode(model, items)`: returns each item's embeddings, (num_embeds, embedding_size), for items of one `batch_key`.
    `num_patches(config, item)`: returns how many patches of the item the tower gets. This is the item's cost.
    `batch_key(item)`: returns a key. Items with equal keys may go through the tower together.
    `on_host`: names of the item's tensors that the model's Python code reads, such as sizes. They stay on the CPU: a
    read from a GPU would wait for all work that the GPU was given before.
    `division`: how a large item is divided. None means that every item is encoded whole.
    """

    encode: Callable[[PreTrainedModel, Sequence[ItemTensors]], list[torch.Tensor]]
    num_patches: Callable[[PreTrainedConfig, ItemTensors], int]
    batch_key: Callable[[ItemTensors], Hashable] = row_shapes
    on_host: frozenset[str] = frozenset()
    division: Division | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily(HalfModel):
    """The vision half of a model, see `HalfModel`.

    `tower`: the path of the module that an item's pixels go into first.
    `projector`: paths of the modules and parameters that bring the tower's features to the language model's size. A
    path may lead into the tower, as Qwen's merger does. All other modules and parameters belong to the tower.
    `has_tiles`: whether the tower gets one tensor whose first axis counts tiles of one size, and encodes each tile by
    itself.
    `is_packed`: whether the tower takes pictures of all sizes packed on one axis, see `encoder/packed_attention.py`."""

    unused: tuple[str, ...] = ("model.language_model", "lm_head")
    tower: str
    projector: tuple[str, ...]
    modalities: Mapping[str, VisionModality]
    has_tiles: bool = False
    is_packed: bool = False
