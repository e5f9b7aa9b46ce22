"""How the tensors of a Hugging Face image or video processor split into items, and how items are put together again.

So that items can be processed, cached, shipped and batched one by one. One layout per output field, declared by the
model family.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from preprocess.schema import ItemTensors

Outputs = Mapping[str, Any]
"""What a Hugging Face image or video processor returns: tensors, or lists of tensors, by name."""


class FieldLayout(Protocol):
    """One output field of a processor that was given `num_items` items."""

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        """One tensor an item, which may share memory with `value`."""

    def merge(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
        """The field as the processor returns it for all items at once."""


@dataclass(frozen=True, slots=True)
class Batched:
    """One row an item on axis 0.

    Where the processor pads rows to the batch's largest, `shape(outputs, index)` gives the item's own leading sizes,
    to which its row is cut; merging pads with `fill` again.
    """

    shape: Callable[[Outputs, int], Sequence[int]] | None = None
    fill: int = 0

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        rows = [torch.as_tensor(value[index]) for index in range(num_items)]
        if self.shape is None:
            return rows
        return [_cut(row, self.shape(outputs, index)) for index, row in enumerate(rows)]

    def merge(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.shape is None:
            return torch.stack(list(items))
        largest = [max(sizes) for sizes in zip(*(item.shape for item in items), strict=True)]
        return torch.stack([_pad(item, largest, self.fill) for item in items])


@dataclass(frozen=True, slots=True)
class Flat:
    """Items of different sizes one after the other on `axis`; `sizes(outputs)` gives each one's length there."""

    sizes: Callable[[Outputs], Sequence[int] | torch.Tensor]
    axis: int = 0

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        sizes = [int(size) for size in self.sizes(outputs)]
        assert len(sizes) == num_items
        return list(torch.split(torch.as_tensor(value), sizes, dim=self.axis))

    def merge(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(items), dim=self.axis)


@dataclass(frozen=True, slots=True)
class Shared:
    """The same for every item of a call."""

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        return [torch.as_tensor(value)] * num_items

    def merge(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
        return items[0]


Fields = Mapping[str, FieldLayout]


def split_items(fields: Fields, outputs: Outputs, num_items: int) -> list[ItemTensors]:
    """Each item's tensors by field name."""
    columns = {name: layout.split(outputs[name], outputs, num_items) for name, layout in fields.items()}
    return [{name: column[index] for name, column in columns.items()} for index in range(num_items)]


def merge_items(fields: Fields, items: Sequence[ItemTensors]) -> dict[str, torch.Tensor]:
    """The fields as one call of the processor with all `items` returns them."""
    return {name: layout.merge([item[name] for item in items]) for name, layout in fields.items()}


def _cut(row: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    for axis, size in enumerate(sizes):
        row = row.narrow(axis, 0, int(size))
    return row


def _pad(item: torch.Tensor, sizes: Sequence[int], fill: int) -> torch.Tensor:
    # torch's pad counts axes from the last one, and gives (before, after) for each.
    missing = [want - have for want, have in zip(sizes, item.shape, strict=True)]
    return F.pad(item, [width for size in reversed(missing) for width in (0, size)], value=fill)
