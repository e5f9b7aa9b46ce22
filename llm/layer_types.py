"""The types of a text model's layers, in a configuration's `layer_types`."""

from collections.abc import Set as AbstractSet

from transformers import PreTrainedConfig

INDEXED = frozenset({"indexed_attention", "minimax_m3_sparse"})
"""An indexer chooses the positions that a token sees."""
REFERENCE = frozenset({"reference_sliding_attention"})
"""A token of an answer sees the whole prompt, and a window of the answer."""
HYBRID = frozenset({"hybrid", "hybrid_sliding"})
"""Attention with a bias by distance, and short convolutions beside it, which have states."""
STATE = frozenset({"linear_attention", "conv"})
"""A state takes the place of a KV cache."""
_WITHOUT_CACHE = STATE | {"mlp", "moe"}
_PLAIN = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Chunked attention is full attention here, because the context is no longer than a chunk."""
SUPPORTED = _PLAIN | INDEXED | REFERENCE | HYBRID | _WITHOUT_CACHE


def layer_types(text_config: PreTrainedConfig) -> list[str]:
    """Returns the type of each layer; none, if the configuration does not tell any."""
    types = getattr(text_config, "layer_types", None) or ()
    return list(types[: text_config.num_hidden_layers])


def has_layers(text_config: PreTrainedConfig, types: AbstractSet[str]) -> bool:
    return not types.isdisjoint(layer_types(text_config))


def num_attention_layers(text_config: PreTrainedConfig) -> int:
    """Returns the number of layers with a KV cache."""
    types = layer_types(text_config)
    return sum(kind not in _WITHOUT_CACHE for kind in types) if types else int(text_config.num_hidden_layers)
