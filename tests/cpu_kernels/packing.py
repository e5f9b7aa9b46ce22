"""Packed weights for the kernels' tests."""

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import Linear
from raylens.cpu_kernels.packed_weight import EXACT, PackedWeight, QuantizedRows, WeightLayout


def pack(
    library: KernelLibrary, weight: torch.Tensor, layout: WeightLayout | None = None, row_parts: int = EXACT
) -> PackedWeight:
    layout = layout or WeightLayout.of(weight)
    packed = PackedWeight(library, layout, HugePages([layout.num_bytes(library)]), row_parts=row_parts)
    packed.write(weight)
    return packed


def pack_quantized(
    library: KernelLibrary, rows: QuantizedRows, layout: WeightLayout, row_parts: int = EXACT
) -> PackedWeight:
    packed = PackedWeight(library, layout, HugePages([layout.num_bytes(library)]), row_parts=row_parts)
    packed.write_quantized(rows)
    return packed


def is_product(product: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether it is off by rounding only. How far a sum may round depends on the sizes of its terms, not on how large
    it is in the end."""
    linear = torch.nn.functional.linear
    expected = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    sizes = linear(rows.abs().double(), weight.abs().double(), None if bias is None else bias.abs().double())
    return bool(((product - expected).abs() <= 8 * 2**-24 * sizes).all())


def pack_linear(library: KernelLibrary, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return Linear(pack(library, weight), bias)
