"""Rounds weights to whole numbers with a scale for each group of a row. The structure mirrors `csrc/quantize.h`."""

import ctypes

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import QuantizedRows, WeightLayout
from raylens.cpu_kernels.structures import addresses, floats, integers
from raylens.cpu_kernels.threads import num_threads

_LARGEST = {"int8": 127, "int4": 7}
_NUM_CLIPPED = {"int8": 0, "int4": 6}


class _Rounding(ctypes.Structure):
    _fields_ = [
        *addresses("weight", "numbers", "scales"),
        *integers("rows", "num_k", "group"),
        *floats("largest"),
        *integers("num_clipped"),
    ]


def quantize(library: KernelLibrary, rows: torch.Tensor, layout: WeightLayout) -> QuantizedRows:
    """Returns rows of a weight, (rows, in_features), in a layout of int8 or int4 without zeros and with groups of at
    most 256: rounded to the nearest, and in 4 bits with the scale of the smallest squared error."""
    weight = rows.detach().float().contiguous()
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), layout.num_groups)
    places = (tensor.data_ptr() for tensor in (weight, numbers, scales))
    sizes = (*weight.shape, layout.group_size, _LARGEST[layout.form], _NUM_CLIPPED[layout.form])
    rounding = _Rounding(*places, *sizes)
    library.quantize(ctypes.addressof(rounding), num_threads())
    return QuantizedRows(numbers, scales)
