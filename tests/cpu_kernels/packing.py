"""Packed weights for the kernels' tests."""

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import Linear
from raylens.cpu_kernels.packed_weight import PackedWeight, QuantizedRows, WeightLayout


def pack(library: KernelLibrary, weight: torch.Tensor, layout: WeightLayout | None = None) -> PackedWeight:
    layout = layout or WeightLayout.of(weight)
    packed = PackedWeight(library, layout, HugePages([layout.num_bytes(library)]))
    packed.write(weight)
    return packed


def pack_quantized(library: KernelLibrary, rows: QuantizedRows, layout: WeightLayout) -> PackedWeight:
    packed = PackedWeight(library, layout, HugePages([layout.num_bytes(library)]))
    packed.write_quantized(rows)
    return packed


def pack_linear(library: KernelLibrary, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return Linear(pack(library, weight), bias)
