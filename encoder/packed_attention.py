"""Attention over pictures of any sizes packed on one axis. Each picture attends to itself only.

It is registered with transformers under a name that contains "flash". For such names the towers call attention once for
all pictures and pass the bounds of the pictures. For other names Qwen's tower calls attention for each picture, and
Pixtral's tower passes a mask of (num_patches, num_patches)."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from raylens.cpu_kernels.library import kernel_library
from raylens.encoder.tile_attention import attend_in_order
from raylens.modeling.varlen_attention import has_kernel

ATTENTION_NAME = "raylens_packed_flash"
KERNEL_ATTENTION_NAME = "raylens_kernels_packed_flash"
"""The same with Raylens' kernels on the CPU."""


def use_packed_attention(tower: PreTrainedModel, *, with_kernels: bool) -> None:
    """Sets a loaded tower's attention to `packed_attention`. `with_kernels`: by Raylens' kernels, in float32 on the
    CPU.

    Call this after loading: for such a name `from_pretrained` would import flash-attn, an optional package."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionInterface.register(KERNEL_ATTENTION_NAME, partial(packed_attention, by_kernels=True))
    tower.config._attn_implementation = KERNEL_ATTENTION_NAME if with_kernels else ATTENTION_NAME


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    by_kernels: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention function: takes `query`, `key` and `value`, (1, heads, num_patches, head_dim),
    and returns (1, num_patches, heads, head_dim).

    `cu_seq_lens_q`: (num_sequences + 1,) int32, the cumulative lengths of the sequences, for queries and keys.
    `max_length_q`: the length of the longest sequence. `by_kernels`: whether Raylens' kernels, which must be available,
    compute the result; it is equal but for rounding. The `others` do not change the result. Raises ValueError for a
    mask."""
    if attention_mask is not None:
        raise ValueError("packed attention takes no mask")
    if by_kernels:
        library = kernel_library()
        assert library is not None, "the tower was told to use it"
        return attend_in_order(module, library, query, key, value, cu_seq_lens_q.tolist(), scaling).unsqueeze(0), None
    if has_kernel(query):
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output: Any = varlen_attn(
            queries, keys, values, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling
        )
        return output.unsqueeze(0), None
    # One call a sequence, bit-identical to transformers' own path. It reads the lengths from the device.
    lengths = cu_seq_lens_q.diff().tolist()
    splits = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs = [
        sdpa_attention_forward(module, *own, attention_mask=None, scaling=scaling, is_causal=False)[0]
        for own in zip(*splits, strict=True)
    ]
    return torch.cat(outputs, dim=1), None
