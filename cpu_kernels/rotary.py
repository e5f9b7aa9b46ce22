"""Rotary embeddings that rotate the first half of a head's first numbers with the second half, see `csrc/rotary.h`."""

import ctypes
from dataclasses import dataclass

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import RowsStructure, address_of, addresses, integers
from raylens.cpu_kernels.threads import num_threads


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotations of positions, for a head's first `dim` numbers.

    `cosines` and `sines`: (positions, dim), float32. `axes`: (dim,), int64, the axis of the positions that rotates a
    number."""

    cosines: torch.Tensor
    sines: torch.Tensor
    axes: torch.Tensor


class RopeStructure(ctypes.Structure):
    _fields_ = addresses("cosines", "sines", "axes") + integers("dim", "num_positions")

    @classmethod
    def of(cls, rope: Rope) -> "RopeStructure":
        num_positions, dim = rope.cosines.shape
        return cls(*map(address_of, (rope.cosines, rope.sines, rope.axes)), dim, num_positions)


class _Heads(ctypes.Structure):
    _fields_ = [
        ("from", RowsStructure),
        *addresses("to", "cosines", "sines"),
        *integers("num_tokens", "heads", "dim"),
    ]


def rotated(library: KernelLibrary, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Takes (num_tokens, num_heads, dim), and (num_tokens, dim) for each token's rotation, all float32. Returns
    (num_tokens, num_heads, dim). Raises ValueError for other shapes or dtypes."""
    num_tokens, num_heads, dim = heads.shape
    turns = [tensor.contiguous() for tensor in (cosines, sines)]
    if dim % 2 or any(tensor.shape != (num_tokens, dim) for tensor in turns):
        got = " and ".join(str(list(tensor.shape)) for tensor in turns)
        raise ValueError(f"a rotation of {list(heads.shape)} takes [{num_tokens}, {dim}], got {got}")
    if any(tensor.dtype is not torch.float32 for tensor in (heads, *turns)):
        raise ValueError(f"rotations are computed in float32, got {heads.dtype}")
    rows = heads if heads.stride(-1) == 1 else heads.contiguous()
    output = torch.empty_like(heads, memory_format=torch.contiguous_format)
    own = _Heads(RowsStructure.of(rows), *map(address_of, (output, *turns)), num_tokens, num_heads, dim)
    library.rotate(ctypes.addressof(own), num_threads())
    return output
