"""The kinds of language halves that every test of a whole decoder goes through."""

from dataclasses import dataclass, field
from pathlib import Path

from raylens.modeling.families import SERVED_FAMILIES
from tests.small_models import Json, make_checkpoint

WINDOWS: Json = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@dataclass(frozen=True)
class Variant:
    """A family with a text model of some kind."""

    model_type: str
    text_config: Json = field(default_factory=dict)
    is_tied: bool = False

    def checkpoint(self, folder: Path) -> str:
        return make_checkpoint(self.model_type, folder, self.text_config, is_tied=self.is_tied)


# `make quick` runs only the first variant. Gemma 3 differs most from a plain decoder.
VARIANTS = {name: Variant(name) for name in ("gemma3", *sorted(SERVED_FAMILIES))} | {
    "gemma3": Variant("gemma3", WINDOWS, is_tied=True),
    # Layers that see what earlier ones keep, and MLPs that choose among their activations.
    "gemma3n": Variant(
        "gemma3n",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 12,
            "num_kv_shared_layers": 2,
            "intermediate_size": [64] * 6,
            "activation_sparsity_pattern": [0.5, *[0.0] * 5],
        },
    ),
    # Windows too small for a picture: they cut what its tokens see of each other.
    "gemma3, narrow windows": Variant("gemma3", {**WINDOWS, "sliding_window": 3}),
    "llava, one key-value head": Variant("llava", {"num_key_value_heads": 1, "head_dim": 12}),
    "llava, as many key-value heads as heads": Variant("llava", {"num_key_value_heads": 4, "head_dim": 8}),
    "llava, windows everywhere": Variant("llava", {"model_type": "mistral", "sliding_window": 9}),
    "internvl, qwen3": Variant("internvl", {"model_type": "qwen3", "head_dim": 8}),
    "mistral3, queries scaled by position": Variant(
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "paligemma 2": Variant(
        "paligemma",
        {
            **WINDOWS,
            "model_type": "gemma2",
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 4,
        },
    ),
    "qwen2_5_vl, windows": Variant("qwen2_5_vl", {**WINDOWS, "use_sliding_window": True}),
    "qwen3_vl, tied": Variant("qwen3_vl", is_tied=True),
}
