"""Attention over a paged KV cache, registered with transformers. `llm/cpu/` and `llm/cuda/` compute it.

All sequences of a step are flattened into one axis of `num_tokens` positions: first the decoding sequences with one
token each, then the prefill chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from raylens.cpu_kernels.packed_weight import EXACT
from raylens.llm.step_input import StepInput
from raylens.modeling.packed_linear import row_parts

ATTENTION_NAME = "raylens_paged"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder layer's cache entry for one position. `window`: the size of the sliding window, which
    includes the position itself; None: all earlier positions."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def block_bytes(layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block of the KV cache in all layers, keys and values together."""
    num_values = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return block_size * num_values * dtype.itemsize


@dataclass(slots=True)  # not frozen: each layer makes one in each step
class AttentionCall:
    """One layer's attention over the step's tokens. `queries` are (num_tokens, heads, key_dim), `keys` (num_tokens,
    kv_heads, key_dim) and `values` (num_tokens, kv_heads, value_dim).

    Scores are multiplied by `scaling`. A `softcap` then bounds them: softcap * tanh(score / softcap). `sees_chosen`:
    whether a token sees only positions that are chosen for it, see `llm/attention_variants/indexers.py`.

    `bias`: (heads, num_tokens, distances), what a token adds to the score of a position, by its distance. `sinks`:
    (heads, num_tokens, 1), the score of a further position, whose value is 0. `row_parts`: how Raylens' kernels may
    round, see `cpu_kernels.attention.attend`."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    softcap: float | None
    window: int | None
    sees_chosen: bool = False
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    row_parts: int = EXACT


class AttentionBackend(Protocol):
    """The type of the decoder's keyword argument `attention_metadata`: the attention of one step."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Stores the new keys and values in the cache, attends over it and returns (num_tokens, heads, value_dim)."""


class PagedAttention(Protocol):
    """The KV cache and the attention over it, on one kind of device."""

    def prepare(self, step: StepInput) -> AttentionBackend:
        """Returns the step's attention, which all layers share. The step's tensors are on the device."""


# Arguments of transformers' attention functions that do not change the result here.
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"})
_OF_INDEXERS = frozenset({"indices", "block_indices"})
"""Arguments with the choice of an indexer, which `llm/attention_variants/indexers.py` notes."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention function. Takes `query` (1, heads, num_tokens, head_dim), and `key` and
    `value` with kv_heads; returns (1, num_tokens, heads, head_dim of `value`). `scaling` None: 1 / sqrt(head_dim).
    `position_bias`: (1, heads, num_tokens, distances), of a module with `has_distance_bias`. `sinks`: (1, heads,
    num_tokens, 1). Raises TypeError for an unknown argument, because a model may change its attention by one. A module
    with `cross_states` attends to these instead."""
    # With `skip_topk` a layer shares the choice of another's indexer.
    marks = ("indexer", "skip_topk", "has_reference_window")
    sees_chosen = any(getattr(module, mark, None) not in (None, False) for mark in marks)
    known = _WITHOUT_EFFECT | _OF_INDEXERS if sees_chosen else _WITHOUT_EFFECT
    if not getattr(module, "has_distance_bias", False):
        others |= {"position_bias": position_bias, "sinks": sinks}
    if unknown := {name for name in others.keys() - known if others[name] is not None}:
        raise TypeError(f"attention with {sorted(unknown)} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (cross := getattr(module, "cross_states", None)) is not None:
        return cross.attend(module, query, key, value, scale), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    own_bias, own_sinks = (None if one is None else one[0] for one in (position_bias, sinks))
    parts = row_parts(module) if query.device.type == "cpu" else EXACT
    call = AttentionCall(
        layer, queries, keys, values, scale, softcap, sliding_window, sees_chosen, own_bias, own_sinks, parts
    )
    return attention_metadata.attend(call).unsqueeze(0), None


def register_paged_attention() -> None:
    """Registers `ATTENTION_NAME` with transformers, before a model is loaded with it. No mask function is registered,
    because attention backends build their own masks, and transformers would search the positions for packed sequences,
    which synchronizes with the device in each step."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
