"""What the encoder has to be told about a model family; what is the same for most has a default here."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from modeling.half_model import HalfModel
from preprocess.schema import ItemTensors


def row_shapes(item: ItemTensors) -> Hashable:
    """Names of an item's tensors and their shapes but for the first axis, on which items are put one behind another."""
    return tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(item.items()))


def all_together(item: ItemTensors) -> Hashable:
    """The key of items of which any may be encoded with any other."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModality:
    """How items of one kind are encoded. Items come as Preprocess makes them, one dictionary of tensors each.

    `encode(model, items)`: the embeddings of each item, (num_embeds, embedding_size), of items with one `batch_key`.
    `num_patches(config, item)`: how many patches the tower gets of an item, which is what it costs.
    `batch_key(item)`: items go through the tower together where it is equal.
    `on_host`: names of an item's tensors that the model's Python code reads, as sizes: they stay on the CPU; reading
    from a GPU would wait for all that it was given before.
    """

    encode: Callable[[PreTrainedModel, Sequence[ItemTensors]], list[torch.Tensor]]
    num_patches: Callable[[PreTrainedConfig, ItemTensors], int]
    batch_key: Callable[[ItemTensors], Hashable] = row_shapes
    on_host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily(HalfModel):
    """The vision half of a model, see `HalfModel`.

    `tower`: the path of the module that an item's pixels go into first.
    `projector`: paths of the modules and parameters behind the tower, which bring features to the language model's
    size; all others are the tower's, also where a path leads into it.
    `has_tiles`: whether the tower gets one tensor whose first axis counts tiles of one size, each encoded by itself.
    `is_packed`: whether the tower takes pictures of all sizes on one axis, see `encoder.packed_attention`."""

    unused: tuple[str, ...] = ("model.language_model", "lm_head")
    tower: str
    projector: tuple[str, ...]
    modalities: Mapping[str, VisionModality]
    has_tiles: bool = False
    is_packed: bool = False
