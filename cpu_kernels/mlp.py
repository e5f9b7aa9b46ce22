"""An MLP in one call, see `csrc/mlp.h`."""

import ctypes

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.linear import ACTIVATIONS, Activation, Linear, LinearStructure
from raylens.cpu_kernels.packed_weight import check_rows
from raylens.cpu_kernels.threads import num_threads


class _Mlp(ctypes.Structure):
    _fields_ = [
        ("first", LinearStructure),
        ("up", LinearStructure),
        ("down", LinearStructure),
        ("activation", ctypes.c_int64),
    ]


class Mlp:
    """down(activation(first(x))), or with an `up` down(activation(first(x)) * up(x))."""

    def __init__(
        self, library: KernelLibrary, first: Linear, up: Linear | None, down: Linear, activation: Activation
    ) -> None:
        self._library = library
        self._kept = (first, up, down)  # keeps alive the memory whose addresses the structure holds
        self._in_features, self._out_features = first.weight.layout.in_features, down.weight.layout.out_features
        self._inner_size = first.weight.layout.out_features
        structures = (LinearStructure.of(linear) for linear in self._kept)
        self._own = _Mlp(*structures, ACTIVATIONS.index(activation))
        self._address = ctypes.addressof(self._own)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Takes (..., in_features), float32, and returns (..., out_features). A row's result is bit-identical for any
        number of other rows.

        Raises ValueError for rows of another width or dtype."""
        check_rows(rows, self._in_features)
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], self._out_features)
        count = rows.numel() // self._in_features
        num_at_once = min(count, self._library.rows_at_once)
        room = rows.new_empty(num_at_once, max(self._in_features, self._inner_size) + self._inner_size)
        self._library.mlp(self._address, count, rows.data_ptr(), output.data_ptr(), room.data_ptr(), num_threads())
        return output
