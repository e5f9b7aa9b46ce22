"""Attention over the paged KV cache, plugged into transformers' models under the name `raylens_paged`.

All sequences of a step lie flattened on one axis of `num_tokens` positions: first the decoding ones, a single
token each, then the prefill chunks one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "raylens_paged"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a decoder layer keeps of each position; `window`: how many positions it sees, itself included, None: all."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def num_values(self) -> int:
        """Numbers kept of one position, keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys and values of all layers: two tensors a layer of shape (num_blocks, block_size, kv_heads, head_dim)."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(layer: LayerShape, head_dim: int) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, layer.num_kv_heads, head_dim, dtype=dtype, device=device)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]

    @staticmethod
    def block_bytes(layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return block_size * sum(layer.num_values for layer in layers) * dtype.itemsize

    def write(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores (num_tokens, kv_heads, head_dim) keys and values at the slots block_id * block_size + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `block_ids` (..., num_blocks), as (..., num_blocks * block_size, kv_heads, head_dim)."""
        return self.keys[layer][block_ids].flatten(-4, -3), self.values[layer][block_ids].flatten(-4, -3)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for: `queries` (num_tokens, heads, key_dim), `keys` and `values` with kv_heads.

    `scaling` None is 1 / sqrt(key_dim). `softcap` bounds the scores, as softcap * tanh(score / softcap).
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float | None
    softcap: float | None
    window: int | None


class AttentionBackend(Protocol):
    """What the forward keyword `attention_metadata` has to be."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns (num_tokens, heads, value_dim)."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`query_length` positions of one sequence, at `query_start` of the flattened axis; the last of them is
    position `context_length - 1` of the sequence, whose blocks are `block_ids`. `masks` by window, each
    (query_length, context_length), are true where a position may be seen."""

    query_start: int
    query_length: int
    context_length: int
    block_ids: torch.Tensor
    masks: Mapping[int | None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a step's tokens lie in the cache. `decode_block_tables` (num_decodes, max_blocks) is padded with
    block 0; `decode_masks` by window, each (num_decodes, 1, 1, max_blocks * block_size), are true where a position may
    be seen. Masks are made once for all layers of a window."""

    kv_cache: KVCache
    slot_mapping: torch.Tensor
    decode_block_tables: torch.Tensor
    decode_masks: Mapping[int | None, torch.Tensor]
    prefills: list[PrefillChunk]

    @property
    def num_decodes(self) -> int:
        return self.decode_block_tables.shape[0]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values into the cache, then attends over it."""
        self.kv_cache.write(call.layer, self.slot_mapping, call.keys, call.values)
        output = call.queries.new_empty(*call.queries.shape[:-1], call.values.shape[-1])
        if self.num_decodes:
            output[: self.num_decodes] = self._decode(call)
        for chunk in self.prefills:
            rows = slice(chunk.query_start, chunk.query_start + chunk.query_length)
            output[rows] = self._prefill(call, rows, chunk)
        return output

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        keys, values = self.kv_cache.gather(call.layer, self.decode_block_tables)
        queries = call.queries[: self.num_decodes].unsqueeze(2)
        output = _attend(call, queries, keys.transpose(1, 2), values.transpose(1, 2), self.decode_masks[call.window])
        return output.squeeze(2)

    def _prefill(self, call: AttentionCall, rows: slice, chunk: PrefillChunk) -> torch.Tensor:
        keys, values = (
            kept[: chunk.context_length].transpose(0, 1).unsqueeze(0)
            for kept in self.kv_cache.gather(call.layer, chunk.block_ids)
        )
        queries = call.queries[rows].transpose(0, 1).unsqueeze(0)
        return _attend(call, queries, keys, values, chunk.masks[call.window])[0].transpose(0, 1)


def _attend(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of (batch, heads, num_queries, key_dim) over (batch, kv_heads, num_keys, ...)."""
    if call.softcap is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=call.scaling, enable_gqa=True)
    # PyTorch's own function has no soft cap.
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    scaling = queries.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = queries @ keys.transpose(2, 3) * scaling
    scores = call.softcap * torch.tanh(scores / call.softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(values.dtype) @ values


# Arguments of transformers' attention functions that change nothing here.
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"})


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: AttentionBackend,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `query` (1, heads, num_tokens, head_dim), `key` and `value` with kv_heads.

    Returns (1, num_tokens, heads, head_dim). Raises TypeError for an argument that it does not know: models hand over
    what changes their attention in this way, e.g. attention sinks.
    """
    if unknown := {name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None}:
        raise TypeError(f"attention with {sorted(unknown)} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    call = AttentionCall(layer, queries, keys, values, scaling, softcap, sliding_window)
    return attention_metadata.attend(call).unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """`paged_attention` makes its own masks from the metadata."""


def register_paged_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers; call before loading a model with it."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
