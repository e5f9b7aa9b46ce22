"""Layers that read the same input become one product, and give what they gave alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raylens.llm.attention import AttentionCall
from raylens.llm.config import EngineConfig
from raylens.llm.loader import load_language_half
from raylens.modeling.merged_linear import LaterPart, MergedLinear, merge_linear_layers
from tests.llm.language_variants import VARIANTS
from tests.llm.operations import Operations

ALREADY_MERGED = {"fuyu": 0, "phi4_multimodal": 0}
"""Families whose checkpoints have one layer for queries, keys and values, and one before the MLP's activation."""


class CausalAttention:
    """Attends within the given tokens, as a step of one prompt does."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (call.queries, call.keys, call.values))
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=call.scaling, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def hidden_states(decoder: nn.Module) -> torch.Tensor:
    weight = next(decoder.parameters())
    config: Any = decoder.config
    embeds = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hidden: torch.Tensor = decoder(
            inputs_embeds=embeds.to(weight.dtype),
            position_ids=torch.arange(5)[None],
            use_cache=False,
            attention_metadata=CausalAttention(),
        ).last_hidden_state
    return hidden


@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoder_computes_the_same_with_fewer_products(name: str, tmp_path: Path) -> None:
    model, family = load_language_half(EngineConfig(VARIANTS[name].checkpoint(tmp_path)))
    decoder = family.find_decoder(model)
    expected, before = hidden_states(decoder), sum(type(one) is nn.Linear for one in decoder.modules())
    merge_linear_layers(decoder, lambda: hidden_states(decoder))
    merged = [one for one in decoder.modules() if isinstance(one, MergedLinear)]
    torch.testing.assert_close(hidden_states(decoder), expected, rtol=1e-5, atol=1e-5)
    assert all(not one.later for one in merged)
    num_layers: int = decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    assert len(merged) >= ALREADY_MERGED.get(name, num_layers)
    saved = sum(isinstance(one, LaterPart) for one in decoder.modules())
    assert sum(type(one) is nn.Linear for one in decoder.modules()) == before - saved - len(merged)


def test_a_layer_of_llava_starts_four_products(tmp_path: Path) -> None:
    model, family = load_language_half(EngineConfig(VARIANTS["llava"].checkpoint(tmp_path)))
    decoder = family.find_decoder(model)
    counts = []
    for _ in range(2):
        with Operations() as operations:
            hidden_states(decoder)
        counts.append(operations.counts["mm"] + operations.counts["addmm"] + operations.counts["linear"])
        merge_linear_layers(decoder, lambda: hidden_states(decoder))
    num_layers: int = decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    assert counts == [7 * num_layers, 4 * num_layers]


class Mixed(nn.Module):
    """Layers of which only the first two go together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.with_bias = (nn.Linear(4, size, bias=size == 5) for size in (3, 2, 5))
        self.twice, self.of_another = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        parts = [self.one(given), self.two(given), self.with_bias(given), self.of_another(given + 1)]
        return torch.cat([*parts, self.twice(self.twice(given))], dim=-1)


def test_only_layers_that_always_read_the_same_go_together() -> None:
    mixed, given = Mixed(), torch.randn(3, 4)
    expected = mixed(given)
    merge_linear_layers(mixed, lambda: mixed(given))
    kinds = [type(one) for one in mixed.children()]
    assert kinds == [MergedLinear, LaterPart, nn.Linear, nn.Linear, nn.Linear]
    torch.testing.assert_close(mixed(given), expected)
