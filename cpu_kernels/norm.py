"""RMS norms of rows in one call, see `csrc/norm.h`."""

import ctypes
from dataclasses import dataclass

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import check_rows
from raylens.cpu_kernels.structures import addresses, floats
from raylens.cpu_kernels.threads import num_threads


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x * x) + eps) * weight. `weight`: (dim,), float32."""

    weight: torch.Tensor
    eps: float


class NormStructure(ctypes.Structure):
    _fields_ = addresses("weight") + floats("eps")

    @classmethod
    def of(cls, norm: Norm | None) -> "NormStructure":
        return cls() if norm is None else cls(norm.weight.data_ptr(), norm.eps)


def normed(library: KernelLibrary, norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """Takes and returns (..., dim), float32. Raises ValueError for rows of another width or dtype."""
    dim = len(norm.weight)
    check_rows(rows, dim)
    rows = rows.contiguous()
    output, own = torch.empty_like(rows), NormStructure.of(norm)
    library.norm(ctypes.addressof(own), rows.data_ptr(), rows.numel() // dim, dim, output.data_ptr(), num_threads())
    return output
