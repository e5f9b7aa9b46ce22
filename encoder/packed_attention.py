"""Attention of pictures of all sizes that lie packed on one axis, each attending to itself alone.

Plugged into transformers' towers under a name with "flash" in it: that is how they choose to call attention once for
all pictures, with the places where these begin, and not once for each (Qwen) or with a mask as large as the square of
all patches (Pixtral).
"""

from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "raylens_packed_flash"

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_HEAD_DIM_STEP, _KERNEL_MAX_HEAD_DIM = 8, 256
_KERNEL_CAPABILITY = (8, 0)
"""What PyTorch's flash attention takes: dtypes, multiples and most of a head's size, and GPUs from Ampere on."""


def use_packed_attention(tower: PreTrainedModel) -> None:
    """Has a loaded tower attend with `packed_attention`. Behind loading: `from_pretrained` would import flash-attn for
    a name like this, which we need not have."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    tower.config._attn_implementation = ATTENTION_NAME


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `query`, `key` and `value` (1, heads, num_patches, head_dim), returns
    (1, num_patches, heads, head_dim).

    `cu_seq_lens_q`, (num_sequences + 1,) int32: where each sequence begins and the last one ends; the keys lie as the
    queries do. `max_length_q`: the longest one's length. Of `others` none changes what is computed here. Raises
    ValueError for a mask, which would be one more limit to what each patch sees.
    """
    if attention_mask is not None:
        raise ValueError("packed attention takes no mask")
    if has_kernel(query):
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output: Any = varlen_attn(
            queries, keys, values, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling
        )
        return output.unsqueeze(0), None
    # One by one, to the bit what transformers' own path makes of them. Reads the lengths back from the device.
    lengths = cu_seq_lens_q.diff().tolist()
    splits = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs = [
        sdpa_attention_forward(module, *own, attention_mask=None, scaling=scaling, is_causal=False)[0]
        for own in zip(*splits, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def has_kernel(query: torch.Tensor) -> bool:
    """Whether one kernel attends over all sequences: on newer CUDA GPUs, in half precision, for most sizes of heads."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _KERNEL_DTYPES
        and head_dim % _KERNEL_HEAD_DIM_STEP == 0
        and head_dim <= _KERNEL_MAX_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= _KERNEL_CAPABILITY
    )
