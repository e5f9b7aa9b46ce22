"""Attention over sequences of any lengths packed on one axis, in one call of PyTorch's `varlen_attn`."""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

# PyTorch 2.11 shares key heads among query heads without an argument.
_SHARED_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def has_kernel(query: torch.Tensor) -> bool:
    """Returns whether PyTorch's flash attention can attend over all sequences: in half precision on CUDA GPUs since
    Ampere, for head sizes that are multiples of 8 up to 256."""
    is_half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    is_supported_size = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return is_half and is_supported_size and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend_causally(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    starts: torch.Tensor,
    longest: tuple[int, int],
    scaling: float,
) -> torch.Tensor:
    """Attends with `queries` (num_queries, heads, head_dim) over `keys` and `values` (num_keys, kv_heads, head_dim).
    Returns (num_queries, heads, head_dim).

    `starts`: (2, num_sequences + 1), int32, the cumulative numbers of queries and of keys. `longest`: the most queries,
    and keys, of one sequence. The queries of a sequence belong to its last positions. Each query sees the keys of its
    sequence up to its own position."""
    query_starts, key_starts = starts
    output: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only if more outputs are requested
        queries,
        keys,
        values,
        query_starts,
        key_starts,
        *longest,
        scale=scaling,
        window_size=(-1, 0),
        **_SHARED_KEY_HEADS,
    )
    return output
