"""A model family's declaration for the encoder, with the defaults that fit most families."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.modeling.half_model import HalfModel
from raylens.preprocess.schema import ItemTensors


def row_shapes(item: ItemTensors) -> Hashable:
    """Returns the names of an item's tensors and their shapes without the first axis.

    Items are concatenated on the first axis."""
    return tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(item.items()))


def all_together(item: ItemTensors) -> Hashable:
    """Returns the same key for every item, so that all items may share a batch."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Divides an item into stretches of units, such as frames or tiles. Tower and projector encode units independently
    of each other.

    `num_units(item)`: returns the number of units. An item of one unit is not divided.
    `take(item, start, stop)`: returns the units [start, stop) as an item of the same `batch_key`. Its tensors may be
    views.
    `join(stretches)`: returns the item's embeddings from the embeddings of consecutive stretches, each (num_embeds,
    embedding_size)."""

    num_units: Callable[[ItemTensors], int]
    take: Callable[[ItemTensors, int, int], ItemTensors]
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModality:
    """The encoding of one modality. An item is a dictionary of tensors from Preprocess.

    `encode(model, items)`: returns each item's embeddings, (num_embeds, embedding_size), for items of one `batch_key`.
    `num_patches(config, item)`: returns the number of the item's patches in the tower, or of a sound's frames. It is
    the item's cost.
    `batch_key(item)`: returns a key. Items with equal keys may share a batch.
    `on_host`: names of tensors that the model's Python code reads, such as sizes. They stay on the CPU, because reading
    them from a GPU would wait for all queued work.
    `division`: of large items. None: every item is encoded whole."""

    encode: Callable[[PreTrainedModel, Sequence[ItemTensors]], list[torch.Tensor]]
    num_patches: Callable[[PreTrainedConfig, ItemTensors], int]
    batch_key: Callable[[ItemTensors], Hashable] = row_shapes
    on_host: frozenset[str] = frozenset()
    division: Division | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily(HalfModel):
    """The vision half of a model, see `HalfModel`.

    `tower`: the path of the first module, which takes an item's pixels.
    `projector`: paths of the modules and parameters that project the tower's features to the language model's size. A
    path may be inside the tower, such as Qwen's merger. All other modules and parameters belong to the tower.
    `has_tiles`: whether the tower takes one tensor with tiles of one size on its first axis, and encodes each tile
    independently.
    `is_packed`: whether the tower takes pictures of all sizes packed on one axis, see `encoder/packed_attention.py`."""

    unused: tuple[str, ...] = ("model.language_model", "lm_head")
    tower: str = "model.vision_tower"
    projector: tuple[str, ...] = ("model.multi_modal_projector",)
    modalities: Mapping[str, VisionModality]
    has_tiles: bool = False
    is_packed: bool = False
