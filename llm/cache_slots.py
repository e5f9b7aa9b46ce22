"""Reads and writes slots of a layer's KV cache on a GPU, (num_blocks, block_size, kv_heads, dim), and checks its
dtype."""

import torch

_FLOAT8_CAPABILITY = (8, 9)
"""The least compute capability for which Triton supports float8_e4m3fn: Ada's."""


def check_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the decode kernels cannot read a cache of `dtype` on the CUDA device."""
    capability = torch.cuda.get_device_capability(device)
    if dtype is torch.float8_e4m3fn and capability < _FLOAT8_CAPABILITY:
        raise ValueError(
            "kv_cache_dtype: float8_e4m3fn takes a GPU of compute capability 8.9 or higher, such as an L4 or an H100;"
            f" this one has {capability[0]}.{capability[1]}. Take auto"
        )


def write_slots(cache: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new`, (num_tokens, kv_heads, dim), to the slots of the cache."""
    _movable(cache).flatten(0, 1).index_copy_(0, slots, _movable(new.to(cache.dtype)))


def read_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the content of the slots, (num_slots, kv_heads, dim), in the cache's dtype."""
    return _movable(cache).flatten(0, 1)[slots].view(cache.dtype)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, with a float8 viewed as bytes, because PyTorch's indexing does not support float8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
