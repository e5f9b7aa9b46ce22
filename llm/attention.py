"""Attention over a paged KV cache, plugged into transformers' models under the name `raylens_paged`.

All sequences of a step lie flattened on one axis of `num_tokens` positions: first the decoding ones, a single
token each, then the prefill chunks one after another. How they attend is up to the device: `cpu_attention`,
`cuda_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from llm.step_input import StepInput

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


def block_bytes(layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of the KV cache takes over all layers, keys and values together."""
    return block_size * sum(layer.num_values for layer in layers) * dtype.itemsize


@dataclass(slots=True)  # not frozen: each layer makes one in each step
class AttentionCall:
    """What one layer asks for: `queries` (num_tokens, heads, key_dim), `keys` and `values` with kv_heads.

    Scores are multiplied by `scaling`; `softcap` bounds them, as softcap * tanh(score / softcap).
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    softcap: float | None
    window: int | None


class AttentionBackend(Protocol):
    """What the forward keyword `attention_metadata` has to be."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Stores the new keys and values, attends over all that are seen, returns (num_tokens, heads, value_dim)."""


class PagedAttention(Protocol):
    """The KV cache and what attends over it, on one kind of device."""

    def prepare(self, step: StepInput) -> AttentionBackend:
        """What all layers share in attending to the step's tokens, whose tensors are on the device."""


# Arguments of transformers' attention functions that change nothing here.
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"})


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `query` (1, heads, num_tokens, head_dim), `key` and `value` with kv_heads.

    `scaling` None is 1 / sqrt(head_dim). Returns (1, num_tokens, heads, head_dim). Raises TypeError for an argument
    that it does not know: models hand over what changes their attention in this way, e.g. attention sinks.
    """
    if unknown := {name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None}:
        raise TypeError(f"attention with {sorted(unknown)} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    call = AttentionCall(layer, queries, keys, values, scaling, softcap, sliding_window)
    return attention_metadata.attend(call).unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """`paged_attention` makes its own masks from the metadata."""


def register_paged_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers; call before loading a model with it."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
