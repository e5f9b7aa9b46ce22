"""The weight of a linear layer in the product's reading order (`csrc/packed_product.h`)."""

import ctypes
from dataclasses import dataclass

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import address_of, addresses, integers
from raylens.cpu_kernels.threads import num_threads


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The sizes of a weight, (out_features, in_features). `is_short`: whether its numbers are stored in two bytes."""

    out_features: int
    in_features: int
    is_short: bool

    @classmethod
    def of(cls, weight: torch.Tensor) -> "WeightLayout":
        """Returns the layout of a float32 `weight`: short if bfloat16 represents every number exactly."""
        assert weight.dtype == torch.float32, weight.dtype
        is_short = bool((weight.detach().view(torch.int32) & 0xFFFF == 0).all())
        out_features, in_features = weight.shape
        return cls(out_features, in_features, is_short)

    def num_bytes(self, library: KernelLibrary) -> int:
        columns = -(-self.out_features // library.panel_columns) * library.panel_columns
        return columns * self.in_features * (2 if self.is_short else 4)


class _PackedWeight(ctypes.Structure):
    """Mirrors `PackedWeight` of `csrc/packed_product.h`."""

    _fields_ = addresses("panels") + integers("rows_out", "num_k", "is_bfloat16")


class PackedWeight:
    """Multiplies rows of float32 with a weight. A short layout gives bit-identical results."""

    def __init__(self, library: KernelLibrary, weight: torch.Tensor, layout: WeightLayout, pages: HugePages) -> None:
        """Takes `layout.num_bytes(library)` bytes of `pages`."""
        self.layout = layout
        self._library = library
        self._panels = pages.take(layout.num_bytes(library))
        sizes = (layout.out_features, layout.in_features, layout.is_short)
        self._own = _PackedWeight(self._panels.data_ptr(), *sizes)
        self.address = ctypes.addressof(self._own)
        weight = weight.detach().contiguous()
        library.pack(weight.data_ptr(), *sizes, self._panels.data_ptr())

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `rows` (..., in_features) times the weight, plus `bias`, (out_features,), float32. A row's result is
        bit-identical for any number of other rows. Raises ValueError for rows of another width or dtype."""
        check_rows(rows, self.layout.in_features)
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], self.layout.out_features)
        count = rows.numel() // self.layout.in_features
        num_at_once = min(count, self._library.rows_at_once)
        room = rows.new_empty(num_at_once, self.layout.in_features) if count > 1 else None
        places = (address_of(tensor) for tensor in (rows, bias, output, room))
        self._library.product(self.address, count, *places, num_threads())
        return output


def check_rows(rows: torch.Tensor, in_features: int) -> None:
    """Raises ValueError unless `rows` are (..., in_features), float32."""
    if rows.dtype != torch.float32 or rows.shape[-1] != in_features:
        raise ValueError(f"rows of {in_features} numbers in float32 are wanted, not {[*rows.shape]} in {rows.dtype}")
