"""Tensors between processes, as numpy arrays, which Ray maps into the reader's memory without a copy.

Ray can map torch tensors, too, but would import torch into every process, even one that only forwards references."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from ray.util import get_node_ip_address

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of any dtype. For dtypes that numpy lacks (bfloat16), `array` holds the bits as integers. `packed_at`:
    wall time in seconds. `node`: address of the origin node."""

    array: npt.NDArray[np.generic]
    dtype: str
    packed_at: float
    node: str

    @classmethod
    def pack(cls, tensor: "torch.Tensor") -> "PackedTensor":
        """Shares the memory of a contiguous CPU tensor."""
        import torch

        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return cls(bits.numpy(), str(tensor.dtype).removeprefix("torch."), time.time(), _this_node())

    def unpack(self) -> "torch.Tensor":
        """Shares the memory of the array, which is read-only after transport: never write to the tensor."""
        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            bits = torch.from_numpy(self.array)
        return bits.view(getattr(torch, self.dtype))

    @property
    def num_remote_bytes(self) -> int:
        """Returns the bytes that came from another node."""
        return 0 if self.node == _this_node() else self.array.nbytes


_this_node: Callable[[], str] = cache(get_node_ip_address)

PackedItem = dict[str, PackedTensor]
"""An item's tensors by name."""
