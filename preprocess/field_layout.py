"""Splits the tensors of a Hugging Face image or video processor into items, so that each item can be cached, sent and
batched alone. The model family declares one layout for each output field."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from raylens.preprocess.schema import ItemTensors

Outputs = Mapping[str, Any]
"""The result of a Hugging Face image or video processor: tensors, or lists of tensors, by name."""


class FieldLayout(Protocol):
    """Splits one output field into items."""

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        """Returns one tensor for each of `num_items` items. It may share memory with `value`."""


@dataclass(frozen=True, slots=True)
class Batched:
    """Each item has one row on axis 0.

    If the processor pads rows to the largest item of the batch, `shape(outputs, index)` returns the item's own leading
    sizes, and its row is cut to them.
    """

    shape: Callable[[Outputs, int], Sequence[int]] | None = None

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        rows = [torch.as_tensor(value[index]) for index in range(num_items)]
        if self.shape is None:
            return rows
        return [_cut(row, self.shape(outputs, index)) for index, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Flat:
    """Items of different sizes are concatenated on `axis`. `sizes(outputs)` returns each item's length on it."""

    sizes: Callable[[Outputs], Sequence[int] | torch.Tensor]
    axis: int = 0

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        sizes = [int(size) for size in self.sizes(outputs)]
        assert len(sizes) == num_items
        return list(torch.split(torch.as_tensor(value), sizes, dim=self.axis))


Fields = Mapping[str, FieldLayout]


def split_items(fields: Fields, outputs: Outputs, num_items: int) -> list[ItemTensors]:
    """Returns each item's tensors by field name."""
    columns = {name: layout.split(outputs[name], outputs, num_items) for name, layout in fields.items()}
    return [{name: column[index] for name, column in columns.items()} for index in range(num_items)]


def _cut(row: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    for axis, size in enumerate(sizes):
        row = row.narrow(axis, 0, int(size))
    return row
