"""Reads and writes slots of a layer's KV cache on a GPU, (num_blocks, block_size, kv_heads, dim)."""

import torch


def write_slots(cache: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new`, (num_tokens, kv_heads, dim), to the slots of the cache."""
    _movable(cache).flatten(0, 1).index_copy_(0, slots, _movable(new.to(cache.dtype)))


def read_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the content of the slots, (num_slots, kv_heads, dim), in the cache's dtype."""
    return _movable(cache).flatten(0, 1)[slots].view(cache.dtype)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, as bytes if its dtype is a float8: PyTorch's indexing takes bytes, but no float8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
