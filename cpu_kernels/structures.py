"""Fields of ctypes structures, which mirror those of `csrc/`."""

import ctypes
from array import array
from typing import Any, Union

import numpy as np
import torch

Fields = list[tuple[str, Any]]
Memory = Union[torch.Tensor, "np.ndarray[Any, Any]", "array[Any]", None]


def addresses(*names: str) -> Fields:
    return [(name, ctypes.c_void_p) for name in names]


def integers(*names: str) -> Fields:
    return [(name, ctypes.c_int64) for name in names]


def floats(*names: str) -> Fields:
    return [(name, ctypes.c_float) for name in names]


def address_of(memory: Memory) -> int | None:
    """Returns the address of contiguous numbers, for use while `memory` lives. None gives null."""
    if memory is None:
        return None
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    address: int = memory.buffer_info()[0] if isinstance(memory, array) else memory.__array_interface__["data"][0]
    return address


class RowsStructure(ctypes.Structure):
    """(num_tokens, heads, dim), with contiguous numbers of a head."""

    _fields_ = addresses("data") + integers("token_stride", "head_stride")

    @classmethod
    def of(cls, rows: torch.Tensor) -> "RowsStructure":
        return cls(rows.data_ptr(), *rows.stride()[:2])
