"""Attention of tiles of one size by Raylens' kernels on the CPU, registered with transformers by name."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from raylens.cpu_kernels.attention import attend_pictures
from raylens.cpu_kernels.library import KernelLibrary, kernel_library
from raylens.modeling.packed_linear import row_parts

ATTENTION_NAME = "raylens_tiles"


def use_tile_attention(tower: PreTrainedModel) -> None:
    """Sets a loaded tower's attention to `tile_attention`, but in parts with attention of their own."""
    AttentionInterface.register(ATTENTION_NAME, tile_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    tower.config._attn_implementation = ATTENTION_NAME
    for part in tower.modules():
        if isinstance(part, PreTrainedModel) and not part._supports_sdpa:  # such as Gemma 4's tower of sounds
            part.config._attn_implementation = "eager"


def tile_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention function: takes `query`, `key` and `value`, (num_tiles, heads, num_patches,
    head_dim), and returns (num_tiles, num_patches, heads, head_dim).

    The kernels compute full attention within each tile. PyTorch computes everything else."""
    library = kernel_library()
    is_causal = others.get("is_causal", getattr(module, "is_causal", True))
    if library is None or attention_mask is not None or is_causal or not _is_plain(query, key, value):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return output, None
    num_tiles, _, num_patches, head_dim = query.shape
    starts = range(0, (num_tiles + 1) * num_patches, num_patches)
    output = attend_in_order(module, library, query, key, value, starts, head_dim**-0.5 if scaling is None else scaling)
    return output.view(num_tiles, num_patches, *output.shape[1:]), None


def attend_in_order(
    module: nn.Module,
    library: KernelLibrary,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: Iterable[int],
    scaling: float,
) -> torch.Tensor:
    """Takes (batch, heads, num_patches, head_dim), and returns (batch * num_patches, heads, head_dim). `starts`: the
    start of each picture on that axis, and the end of the last one."""
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    return attend_pictures(library, queries, keys, values, starts, scaling=scaling, row_parts=row_parts(module))


def _is_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether the kernels support the tensors: float32 on the CPU, and as many keys as queries."""
    is_float32 = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in (query, key, value))
    return is_float32 and query.shape[2] == key.shape[2] and query.shape[1] % key.shape[1] == 0
