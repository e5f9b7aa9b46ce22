"""Linear layers with packed weights, and an MLP of them in one call. The structures mirror `csrc/mlp.h`."""

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import PackedWeight, check_rows
from raylens.cpu_kernels.structures import address_of, addresses, integers
from raylens.cpu_kernels.threads import num_threads

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""In the library's order."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`bias`: (out_features,), float32."""

    weight: PackedWeight
    bias: torch.Tensor | None


class LinearStructure(ctypes.Structure):
    _fields_ = addresses("weight", "bias")

    @classmethod
    def of(cls, linear: Linear | None) -> "LinearStructure":
        return cls() if linear is None else cls(linear.weight.address, address_of(linear.bias))


class _Mlp(ctypes.Structure):
    _fields_ = [*((name, LinearStructure) for name in ("first", "up", "down")), *integers("activation")]


class Mlp:
    """down(activation(first(x))), or with an `up` down(activation(first(x)) * up(x))."""

    def __init__(
        self, library: KernelLibrary, first: Linear, up: Linear | None, down: Linear, activation: Activation
    ) -> None:
        self._library = library
        self._kept = (first, up, down)  # keeps alive the memory whose addresses the structure holds
        self._in_features, self._out_features = first.weight.layout.in_features, down.weight.layout.out_features
        structures = (LinearStructure.of(linear) for linear in self._kept)
        self._own = _Mlp(*structures, ACTIVATIONS.index(activation))
        self._address = ctypes.addressof(self._own)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Takes (..., in_features), float32, and returns (..., out_features). A row's result is bit-identical for any
        number of other rows. Raises ValueError for rows of another width or dtype."""
        check_rows(rows, self._in_features)
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], self._out_features)
        count = rows.numel() // self._in_features
        self._library.mlp(self._address, count, rows.data_ptr(), output.data_ptr(), num_threads())
        return output
