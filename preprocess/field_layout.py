"""The outputs of a Hugging Face processor for a single item, and the item's tensors among them.

Items are processed one by one, so that each can be cached, sent and batched alone."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from raylens.preprocess.schema import ItemTensors

Outputs: TypeAlias = Mapping[str, Any]
"""The result of a Hugging Face processor's part for the modality: tensors, or lists of tensors, by name."""

Fields: TypeAlias = Mapping[str, Callable[[Any], torch.Tensor]]
"""The outputs that make up an item, by name: `first_row`, if items are stacked on a new axis, or `whole`, if they are
concatenated. An item may lack some, such as the tiles of a large picture."""


def first_row(output: Any) -> torch.Tensor:
    return torch.as_tensor(output[0])


def whole(output: Any) -> torch.Tensor:
    return torch.as_tensor(output)


def item_tensors(fields: Fields, outputs: Outputs) -> ItemTensors:
    """Returns the item's tensors by field name. They may share memory with the outputs."""
    return {name: part(outputs[name]) for name, part in fields.items() if name in outputs}


def blank_pixels(*shape: int) -> npt.NDArray[np.float32]:
    """Returns a broadcast array of the shape, without memory for its elements, for the outputs of a size."""
    return np.broadcast_to(np.float32(0), shape)
