"""Tensors as they travel between processes: numpy arrays, which Ray maps into the reader's memory without a copy.

Ray can map torch tensors, too. But then it imports torch into every process of the cluster, even into processes that
only pass references on."""

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of any dtype; where numpy has none of that kind (bfloat16), `array` holds its bits as integers.
    `packed_at`: wall time in seconds."""

    array: npt.NDArray[np.generic]
    dtype: str
    packed_at: float

    @classmethod
    def pack(cls, tensor: "torch.Tensor") -> "PackedTensor":
        """Shares the memory of a contiguous CPU tensor."""
        import torch

        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return cls(bits.numpy(), str(tensor.dtype).removeprefix("torch."), time.time())

    def unpack(self) -> "torch.Tensor":
        """Shares the memory of the array, which is read-only once it has travelled: never write to the tensor."""
        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            bits = torch.from_numpy(self.array)
        return bits.view(getattr(torch, self.dtype))


PackedItem = dict[str, PackedTensor]
"""An item's tensors by name."""
