"""A linear layer with a packed weight, and activations, in the library's form (`csrc/mlp.h`)."""

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from raylens.cpu_kernels.packed_weight import PackedWeight

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""In the library's order."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`bias`: (out_features,), float32."""

    weight: PackedWeight
    bias: torch.Tensor | None


class LinearStructure(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]

    @classmethod
    def of(cls, linear: Linear | None) -> "LinearStructure":
        if linear is None:
            return cls()
        return cls(linear.weight.address, None if linear.bias is None else linear.bias.data_ptr())
