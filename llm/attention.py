"""Attention over the paged KV cache, plugged into transformers' models under the name `raylens_paged`.

All sequences of a step lie flattened on one axis of `num_tokens` positions: first the decoding ones, a single
token each, then the prefill chunks one after another.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "raylens_paged"


class KVCache:
    """Keys and values of all layers: two tensors a layer of shape (num_blocks, block_size, kv_heads, head_dim)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores (num_tokens, kv_heads, head_dim) keys and values at the slots block_id * block_size + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `block_ids` (..., num_blocks), as (..., num_blocks * block_size, kv_heads, head_dim)."""
        return self.keys[layer][block_ids].flatten(-4, -3), self.values[layer][block_ids].flatten(-4, -3)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`query_length` positions of one sequence, at `query_start` of the flattened axis; the last of them is
    position `context_length - 1` of the sequence, whose blocks are `block_ids`. `mask` (query_length, context_length)
    is true where a position may be seen."""

    query_start: int
    query_length: int
    context_length: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a step's tokens lie in the cache. `decode_block_tables` (num_decodes, max_blocks) is padded with
    block 0; `decode_mask` (num_decodes, 1, 1, max_blocks * block_size) is true where a position is real."""

    kv_cache: KVCache
    slot_mapping: torch.Tensor
    decode_block_tables: torch.Tensor
    decode_mask: torch.Tensor
    prefills: list[PrefillChunk]

    @property
    def num_decodes(self) -> int:
        return self.decode_block_tables.shape[0]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: AttentionMetadata,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `query` (1, heads, num_tokens, head_dim), `key` and `value` with kv_heads.

    Writes the new keys and values into the cache, then attends over it. Returns (1, num_tokens, heads, head_dim).
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    metadata = attention_metadata
    queries = query[0].transpose(0, 1)
    metadata.kv_cache.write(layer, metadata.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = torch.empty_like(queries)
    if metadata.num_decodes:
        output[: metadata.num_decodes] = _decode(layer, queries[: metadata.num_decodes], metadata, scaling)
    for chunk in metadata.prefills:
        rows = slice(chunk.query_start, chunk.query_start + chunk.query_length)
        output[rows] = _prefill(layer, queries[rows], chunk, metadata.kv_cache, scaling)
    return output.unsqueeze(0), None


def _decode(layer: int, queries: torch.Tensor, metadata: AttentionMetadata, scaling: float) -> torch.Tensor:
    keys, values = metadata.kv_cache.gather(layer, metadata.decode_block_tables)
    output = scaled_dot_product_attention(
        queries.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=metadata.decode_mask,
        scale=scaling,
        enable_gqa=True,
    )
    return output.squeeze(2)


def _prefill(layer: int, queries: torch.Tensor, chunk: PrefillChunk, kv_cache: KVCache, scaling: float) -> torch.Tensor:
    keys, values = kv_cache.gather(layer, chunk.block_ids)
    keys, values = keys[: chunk.context_length], values[: chunk.context_length]
    output = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=chunk.mask,
        scale=scaling,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def _no_mask(*_: Any, **__: Any) -> None:
    """`paged_attention` makes its own masks from the metadata."""


def register_paged_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers; call before loading a model with it."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
