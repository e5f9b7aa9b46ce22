"""The weight of a linear layer in the product's reading order (`csrc/packed_weight.h`)."""

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import address_of, addresses, integers
from raylens.cpu_kernels.threads import num_threads

Form = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]
"""The numbers of a weight in memory. float8 is E4M3 without NaN; int4 has the numbers from -8 to 7."""
FORMS: tuple[Form, ...] = get_args(Form)
"""In the library's order."""
_OF_DTYPE: dict[torch.dtype, Form] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_DTYPES = {form: dtype for dtype, form in _OF_DTYPE.items()}
DTYPES = tuple(_OF_DTYPE)
"""Of weights that can be packed."""
UNIT = 4
"""Groups and in_features of a quantized weight are multiples of this number."""
PAIR = 2
"""And the in_features of one of bfloat16 of this number."""
EXACT = 3
"""As many numbers of bfloat16 add up to any number of float32."""
ROWS_AT_ONCE = 4096
"""The rows of a weight to work on together, to keep temporary memory small. A multiple of a panel's columns."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The sizes of a weight, (out_features, in_features), and the form of its numbers.

    `group_size`: so many numbers of a row share a scale, a multiple of UNIT as is `in_features`; 0 in a weight that is
    not quantized. `has_zeros`: whether they also share a zero."""

    out_features: int
    in_features: int
    form: Form
    group_size: int = 0
    has_zeros: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor) -> "WeightLayout":
        """Returns the smallest layout that holds every number of `weight` exactly: for float32, bfloat16 if possible.
        Takes float32, bfloat16 or float16."""
        out_features, in_features = weight.shape
        form = _OF_DTYPE[weight.dtype]
        if form != "float16":
            form = "bfloat16" if in_features % PAIR == 0 and _is_bfloat16(weight) else "float32"
        return cls(out_features, in_features, form)

    @property
    def num_groups(self) -> int:
        """Returns the groups of a row."""
        return -(-self.in_features // self.group_size)

    def num_bytes(self, library: KernelLibrary) -> int:
        own = self.structure(None)
        return int(library.packed_bytes(ctypes.addressof(own)))

    def structure(self, panels: torch.Tensor | None, row_parts: int = EXACT) -> ctypes.Structure:
        """Returns the library's `PackedWeight`."""
        form = FORMS.index(self.form)
        sizes = (self.out_features, self.in_features, form, self.group_size, self.has_zeros, row_parts)
        return _PackedWeight(address_of(panels), *sizes)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a quantized weight: number * scale, or (number - zero) * scale.

    `numbers`: (rows, in_features), int8, or uint8 for the bytes of float8. `scales` and `zeros`: (rows, num_groups),
    float32; zeros are whole numbers, as AMX needs them."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


class _PackedWeight(ctypes.Structure):
    """Mirrors `PackedWeight` of `csrc/packed_weight.h`."""

    _fields_ = addresses("panels") + integers("rows_out", "num_k", "form", "group", "has_zeros", "row_parts")


class _Numbers(ctypes.Structure):
    """Mirrors `Numbers` of `csrc/packed_weight.h`."""

    _fields_ = addresses("numbers", "scales", "zeros") + integers("first_row", "rows")


class PackedWeight:
    """Multiplies rows of float32 with a weight. The results are bit-identical for all forms of the same numbers."""

    def __init__(
        self, library: KernelLibrary, layout: WeightLayout, pages: HugePages, *, row_parts: int = EXACT
    ) -> None:
        """Takes `layout.num_bytes(library)` bytes of `pages`. `write` or `write_quantized` fills them. `row_parts`: how
        many numbers of bfloat16 stand for a number of a row in the library for AMX; 1 to EXACT. Each takes its time.
        The other libraries compute in float32."""
        self.layout = layout
        self._library = library
        self._panels = pages.take(layout.num_bytes(library))
        self._own = layout.structure(self._panels, row_parts)
        self.address = ctypes.addressof(self._own)

    @property
    def row_parts(self) -> int:
        return int(self._own.row_parts)

    @row_parts.setter
    def row_parts(self, value: int) -> None:
        self._own.row_parts = value

    def write(self, rows: torch.Tensor, first_row: int = 0) -> None:
        """Writes rows of the weight from `first_row` on, a multiple of the library's `panel_columns`. A layout of fewer
        bits rounds them."""
        numbers = rows.detach().to(_DTYPES[self.layout.form]).contiguous()
        self._pack(_Numbers(numbers.data_ptr(), None, None, first_row, len(rows)))

    def write_quantized(self, rows: QuantizedRows, first_row: int = 0) -> None:
        """Does the same for a quantized layout."""
        # The kernels read float8 in 2^-8 of its value.
        scales = rows.scales.float() * (256 if self.layout.form == "float8" else 1)
        zeros = None if rows.zeros is None else rows.zeros.float().contiguous()
        kept = (rows.numbers.contiguous(), scales.contiguous(), zeros)
        self._pack(_Numbers(*map(address_of, kept), first_row, len(rows.numbers)))

    def _pack(self, numbers: _Numbers) -> None:
        self._library.pack(self.address, ctypes.addressof(numbers), num_threads())

    def rows(self, indices: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Returns the weight's rows at `indices`, (...), int64, multiplied by `scale`: (..., in_features), float32.
        Raises IndexError for an index without a row."""
        indices = indices.contiguous()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.layout.out_features:
            raise IndexError(f"rows 0 to {self.layout.out_features - 1} are there, not {indices.tolist()}")
        rows = torch.empty(*indices.shape, self.layout.in_features)
        self._library.rows(self.address, indices.data_ptr(), indices.numel(), scale, rows.data_ptr(), num_threads())
        return rows

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `rows` (..., in_features) times the weight, plus `bias`, (out_features,), float32. A row's result is
        bit-identical for any number of other rows, but see `csrc/tile_product.h`. Raises ValueError for rows of another
        width or dtype."""
        check_rows(rows, self.layout.in_features)
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], self.layout.out_features)
        count = rows.numel() // self.layout.in_features
        places = (address_of(tensor) for tensor in (rows, bias, output))
        self._library.product(self.address, count, *places, num_threads())
        return output


def check_rows(rows: torch.Tensor, in_features: int) -> None:
    """Raises ValueError unless `rows` are (..., in_features), float32."""
    if rows.dtype != torch.float32 or rows.shape[-1] != in_features:
        raise ValueError(f"rows of {in_features} numbers in float32 are wanted, not {[*rows.shape]} in {rows.dtype}")


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Returns whether bfloat16 represents every number of `weight`, float32 or bfloat16, exactly."""
    if weight.dtype == torch.bfloat16:
        return True
    parts = torch.split(weight.detach().view(torch.int32), ROWS_AT_ONCE)
    return all(bool((part & 0xFFFF == 0).all()) for part in parts)
