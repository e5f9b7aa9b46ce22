"""Runs one token through a decoder, to learn its layers' cache shapes and to check that all layers use the KV cache."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from raylens.llm.attention import AttentionCall, LayerShape
from raylens.llm.ranks.parallel import RankDiedError


class Probe:
    """Takes the place of a step's attention metadata and records the layers' calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.queries.new_zeros(*call.queries.shape[:-1], call.values.shape[-1])


def run_one_token(decoder: nn.Module, hidden_size: int, inputs: Mapping[str, Any]) -> Probe:
    """Runs the decoder over a token of zeros, whose attention is 0. `inputs`: further ones of the decoder."""
    weight = next(decoder.parameters())
    probe = Probe()
    decoder(
        inputs_embeds=torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device),
        position_ids=torch.zeros(1, 1, dtype=torch.long, device=weight.device),
        use_cache=False,
        **inputs,
        attention_metadata=probe,
    )
    return probe


def probe_layers(
    decoder: nn.Module, *, hidden_size: int, num_layers: int, inputs: Mapping[str, Any] = MappingProxyType({})
) -> list[AttentionCall]:
    """Returns each layer's attention call for a single token, in order. `num_layers`: those with a KV cache. `inputs`:
    further ones of the decoder. Raises ValueError for a decoder with layers that attend otherwise, whose state would
    silently be lost between steps."""
    try:
        probe = run_one_token(decoder, hidden_size, inputs)
    except (torch.AcceleratorError, torch.OutOfMemoryError, RankDiedError):
        raise
    except Exception as error:  # mostly an argument unknown to the decoder or to `paged_attention`
        raise ValueError(f"text models of type {type(decoder).__name__} are not supported: {error!r}") from error
    num_sharing = sum(reads_earlier_cache(module) for module in decoder.modules())
    with_caches = list(dict.fromkeys(call.layer for call in probe.calls))
    if len(probe.calls) != num_layers or with_caches != list(range(num_layers - num_sharing)):
        raise ValueError(
            f"text models of type {type(decoder).__name__} are not supported: {len(probe.calls)} calls"
            f" of paged attention and {len(with_caches)} caches in {num_layers} layers"
        )
    return probe.calls


def reads_earlier_cache(module: nn.Module) -> bool:
    """Returns whether a layer's attention reads an earlier layer's keys and values, by transformers' mark. A layer that
    expands an earlier layer's latents has keys and values of its own."""
    return getattr(module, "is_kv_shared_layer", False) and not hasattr(module, "expand_kv")


def cache_shapes(calls: list[AttentionCall]) -> list[LayerShape]:
    """Returns the shapes of the layers with a cache of their own, in order."""
    shapes = {}
    for call in calls:
        _, num_kv_heads, key_dim = call.keys.shape
        shapes[call.layer] = LayerShape(num_kv_heads, key_dim, call.values.shape[-1], call.window)
    return list(shapes.values())
