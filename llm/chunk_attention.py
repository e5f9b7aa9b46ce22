"""Attention of a prefill chunk on any device, over keys and values gathered into one tensor each."""

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from raylens.llm.attention import AttentionCall


def capped(scores: torch.Tensor, scaling: float, softcap: float) -> torch.Tensor:
    """Returns the scores in float32, scaled and then capped."""
    return softcap * torch.tanh(scores.float() * scaling / softcap)


def attend_chunk(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attends with `queries` (num_queries, heads, key_dim) over `keys` and `values` (kv_heads, num_positions, dim), all
    of one dtype. Returns (num_queries, heads, value_dim).

    `mask`: bool, (num_queries, num_positions), True where a query sees a position. None: causal; the queries belong to
    the last positions.
    """
    queries = queries.transpose(0, 1)
    if call.softcap is None:
        is_square = queries.shape[1] == keys.shape[1]
        # The fastest kernels accept no mask tensor.
        bias = causal_lower_right(queries.shape[1], keys.shape[1]) if mask is None and not is_square else mask
        output = scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=bias,
            is_causal=bias is None,
            scale=call.scaling,
            enable_gqa=True,
        )[0]
        return output.transpose(0, 1)
    # PyTorch's own attention function has no soft cap.
    groups = queries.reshape(len(keys), -1, *queries.shape[1:])
    scores = (groups.flatten(1, 2) @ keys.transpose(1, 2)).view(*groups.shape[:3], -1)
    if mask is None:
        size = scores.shape[-2:]
        mask = torch.ones(size, dtype=torch.bool, device=scores.device).tril(size[1] - size[0])
    weights = capped(scores, call.scaling, call.softcap).masked_fill_(~mask, -torch.inf).softmax(dim=-1)
    output = weights.to(values.dtype).flatten(1, 2) @ values
    return output.view(*groups.shape[:3], -1).flatten(0, 1).transpose(0, 1)
