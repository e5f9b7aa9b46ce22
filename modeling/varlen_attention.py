"""Attention over sequences of any lengths that lie packed on one axis, in one call of PyTorch's `varlen_attn`."""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 8, 256
_CAPABILITY = (8, 0)
"""The limits of PyTorch's flash attention: these dtypes, heads whose size is a multiple of the step and at most the
maximum, and GPUs of at least this compute capability (Ampere)."""

# PyTorch 2.11 shares key heads among query heads without being asked.
_SHARED_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def has_kernel(query: torch.Tensor) -> bool:
    """Returns whether one kernel can attend over all sequences: it can in half precision on CUDA GPUs from Ampere on,
    for most head sizes."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _DTYPES
        and head_dim % _HEAD_DIM_STEP == 0
        and head_dim <= _MAX_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= _CAPABILITY
    )


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

    `starts`, (2, num_sequences + 1), int32: where the queries, and the keys, of each sequence begin and the last ones
    end. `longest`: the most queries, and keys, of one sequence. The queries of a sequence belong to its last positions,
    and each sees all keys of the sequence up to its own position."""
    query_starts, key_starts = starts
    output: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only where it was asked for more
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
