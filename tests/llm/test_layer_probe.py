"""What layers keep is seen in the model; a model that attends in another way is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from raylens.llm.attention import ATTENTION_NAME, LayerShape, block_bytes, register_paged_attention
from raylens.llm.layer_probe import cache_shapes, probe_layers

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def probe(model_type: str, **settings: Any) -> list[LayerShape]:
    register_paged_attention()
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    decoder = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    return cache_shapes(probe_layers(decoder, hidden_size=32, num_layers=config.num_hidden_layers))


def test_windows_differ_by_layer() -> None:
    layers = probe("gemma3_text", layer_types=["sliding_attention", "full_attention"], sliding_window=7)
    assert layers == [LayerShape(2, 8, 8, 7), LayerShape(2, 8, 8, None)]


def test_layers_that_write_over_each_other_are_refused() -> None:
    register_paged_attention()
    decoder: Any = AutoModel.from_config(AutoConfig.for_model("llama", **SMALL), attn_implementation=ATTENTION_NAME)
    decoder.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ValueError, match="2 calls of paged attention and 1 caches in 2 layers"):
        probe_layers(decoder, hidden_size=32, num_layers=2)


def test_keys_and_values_may_differ_in_size() -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    layers = probe("minicpm3", **latent, num_key_value_heads=4)
    assert layers == [LayerShape(4, 16, 12, None)] * 2
    assert block_bytes(layers, block_size=3, dtype=torch.float16) == 3 * 2 * 4 * (16 + 12) * 2


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mamba", {"state_size": 4}, r"position_ids|calls"),  # no attention at all
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),  # attention sinks
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "1 calls"),  # convolutions between the attention
    ],
)
def test_other_layers_are_refused(model_type: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"not supported: .*({reason})"):
        probe(model_type, **settings)
