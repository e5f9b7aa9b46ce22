"""A small configuration of any model type: the default values of its class with every size reduced.

The rules go by the names of settings, so no model type has rules of its own. `EXCEPTIONS` has what no name tells."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Values = dict[str, Any]

NUM_LAYERS, VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 400, 64, 4, 2, 16
_MANY_LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layer")

# The first rule whose pattern is the whole name holds.
_RULES: tuple[tuple[str, int], ...] = (
    ("qk_nope_head_dim|index(er)?_head_dim", 16),
    ("qk_rope_head_dim", 8),
    ("v_head_dim", 12),
    ("q_lora_rank", 24),
    ("kv_lora_rank", 20),
    ("index(er)?_n_heads", 16),
    ("index_topk|index(er)?_budget|index_kpool", 4),
    ("linear_num_key_heads", 2),
    ("linear_num_(value_)?heads|mamba_num_heads", 4),
    ("linear_(key_|value_)?head_dim|mamba_head_dim", 16),
    ("ssm_state_size|mamba_d_state", 8),
    ("(mamba_)?n_groups", 2),
    ("chunk_size", 8),
    (r"(n_|num_|n)(routed_|local_)?experts|moe_num_experts", 4),
    ("(num|n)_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|top_k", 2),
    ("n_group|topk_group", 1),
    ("num_nextn_predict_layers|num_mtp_layers|mtp_num_layers", 0),
    ("first_k_dense_replace|num_kv_shared_layers", 1),
    ("hc_lowrank", 8),
    ("ngram_vocab_size_base", 64),
    ("make_ngram_vocab_size_divisible_by|split_ngram_parts", 4),
    ("heads_per_ngram|ngram_size", 2),
    ("(global_|attention_|decoder_|swa_)?head_dim|d_kv", HEAD_DIM),
    ("hidden_size_per_layer_input|vocab_size_per_layer_input_dim|ple_embed_dim", 16),
    ("vocab_size.*|.*_vocab_size", VOCAB_SIZE),
    (
        "(num_|n_)?(hidden_|encoder_|decoder_|global_|local_|resampler_)?layers|n_layer|depth|num_blocks?"
        "|(perceiver|resampler)_depth|resampler_n_?layers",
        NUM_LAYERS,
    ),
    (".*attention_heads|(n_|num_)?heads|n_head|.*(num|n)_heads|n_query_groups", NUM_HEADS),
    (".*(intermediate|ffn_dim|ffn_hidden|d_ff|mlp_dim|inner_dim|fc_dim|ffn).*(size|dim)?", 96),
    (
        ".*(hidden_size|d_model|embed_dim|embedding_dim|n_embd|(projection|projector)_dim|adapter_(in|out)_dim|out_dim"
        "|output_dim|output_proj_dims|hidden_dim|adapter_input_size|embed_size|hidden_channels|width|model_dim|conv_dim)",
        HIDDEN_SIZE,
    ),
    ("max_position_embeddings|max_seq_len|model_max_length|n_positions|max_length", 512),
    ("sliding_window(_size)?|attention_chunk_size|window_tokens", 16),
    ("num_position_embeddings|num_grid_embeddings", 64),
    ("num_query_tokens|num_queries|n_queries|resampler_n_latents|num_latents", 8),
)
_TOKEN_ID = re.compile(".*token_(id|index|ids)|.*_token|.*image_patch_id|.*_id")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERT_LAYERS = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_SHUFFLED = {"vision_config": {"out_hidden_size": 256}, "out_hidden_size": 256}
_TIMM = {"embed_dim": 64, "img_size": [56, 56], "depth": 2, "num_heads": 4, "global_pool": "", "ref_feat_shape": [4, 4]}
_THINKER = {"vision_start_token_id": 30, "vision_end_token_id": 31, "audio_start_token_id": 32}
# Prompts exceed the distances with a bias, and the positions without a scale.
_INKLING = {"rel_extent": 24, "log_scaling_n_floor": 8, **_EXPERT_LAYERS}
EXCEPTIONS: dict[str, Values] = {
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "deepseek_ocr2": {
        "text_config": {**_EXPERT_LAYERS, "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"image_size": 1024}},
    },
    "dots3_note": {
        "audio_config": {"conv_output_size": 64 * 16},
        "text_config": {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 24,
            "swa_kv_lora_rank": 20,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 24,
            "swa_v_head_dim": 12,
        },
    },
    "emu3": {
        "text_config": {"max_position_embeddings": 2048},
        "vocabulary_map": {
            "<image>": 9,
            "<|extra_200|>": 10,
            **{f"<|visual token {index:06d}|>": 20 + index for index in range(32)},
        },
        "vq_config": {"codebook_size": 32, "base_channels": 64, "channel_multiplier": [1] * 4},
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}},
    "fast_vlm": {"vision_config": {"hidden_size": 3072}},
    "gemma4_unified": {"audio_config": {"audio_embed_dim": 640}},
    # A layer uses the choice of the one before.
    "glm5_next": {
        "text_config": {
            "layer_types": ["indexed_attention", "linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "full", "shared"],
            "index_topk": 12,
        }
    },
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    # Longer contexts than a chunk are cut.
    "llama4": {"text_config": {"attention_chunk_size": 8192}},
    "lfm2_vl": {
        "text_config": {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "full_attn_idxs": [1, 3],
            "block_auto_adjust_ff_dim": False,
        }
    },
    # Fewer layers would need scipy.
    "inkling_mm_model": {"text_config": _INKLING, "vision_config": {"n_layers": 6, "text_hidden_size": 64}},
    "inkling2": {"text_config": _INKLING},
    "minimax_m3_vl": {
        "text_config": {
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "index_n_heads": 2,
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "rotary_dim": 8,
        }
    },
    # Layers use the choice and the latents of others.
    "mistral_large4": {
        "text_config": {"indexer_types": ["full", "full", "full", "shared"], "kv_source_layers": [0, 1, 0, 1]}
    },
    "muse_glimmer": _SHUFFLED,
    "muse_spark": _SHUFFLED,
    "perception_lm": {"vision_config": {"architecture": "vit_pe_core_large_patch14_336", "model_args": _TIMM}},
    "qwen2_5_omni_thinker": _THINKER,
    "qwen3_omni_moe_thinker": _THINKER,
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "number_of_conv_states": 3,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 16,
            "eos_token_id": 2,
        }
    },
    "step3p7": {"text_config": {"sliding_window": 16}},
    # A window of the answer.
    "unlimited_ocr": {"text_config": {"sliding_window": 5}},
}


def small_config(
    model_type: str, *, keeps_images: bool = False, changes: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """`keeps_images`: whether pictures keep the size of the class, which is mostly the processor's, too."""
    config_class = CONFIG_MAPPING[model_type]
    token_ids: dict[int, int] = {}
    values = _small(config_class().to_dict(), token_ids)
    for name, kind in config_class.sub_configs.items():
        own = getattr(kind, "config_class", kind)
        if values.get(name) is None and own.__name__ != "AutoConfig":  # left out by default
            values[name] = _small(own().to_dict(), token_ids)
    values.pop("dtype", None)
    if keeps_images:
        _keep_images(values, config_class().to_dict())
    values = _merged(_merged(values, EXCEPTIONS.get(model_type, {})), changes)
    config: PreTrainedConfig = config_class.from_dict(values)
    text_config: Any = config.get_text_config()
    if isinstance(rope := getattr(text_config, "rope_parameters", None), dict) and "rope_type" in rope:
        text_config.rope_parameters = _small_rope({"mrope_section": [1, 1, 1]} | rope)
    return config


def _keep_images(values: Values, originals: Values) -> None:
    for name, value in originals.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _keep_images(values[name], value)
        elif name in ("image_size", "image_seq_length", "image_grid_pinpoints"):
            values[name] = value


def _merged(values: Values, changes: Mapping[str, Any]) -> Values:
    for name, change in changes.items():
        inner = isinstance(change, dict) and isinstance(values.get(name), dict)
        values[name] = _merged(values[name], change) if inner else change
    return values


def _small(values: Mapping[str, Any], token_ids: dict[int, int]) -> Values:
    kinds = [value for name, value in values.items() if name.endswith("layer_types") and value]
    num_layers = max([NUM_LAYERS, *(len(set(map(str, one))) for one in kinds)])
    # `per_layer_config` follows from the others.
    names = [name for name in values if name != "per_layer_config"]
    return {name: _small_value(name, values, token_ids, num_layers) for name in names}


def _small_value(name: str, values: Mapping[str, Any], token_ids: dict[int, int], num_layers: int) -> Any:
    value = values[name]
    if name in ("rope_parameters", "rope_scaling"):
        return value and _small_rope(value)
    if isinstance(value, dict):
        return (
            _small(value, token_ids) if name.endswith("config") or name in ("backbone", "encoder", "decoder") else value
        )
    if _TOKEN_ID.fullmatch(name) and not isinstance(value, str):
        return _small_ids(value, token_ids)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return _small_list(name, list(value), values, num_layers)
    if name == "image_size":
        patch = values.get("patch_size")
        patch = patch[0] if isinstance(patch, list | tuple) else patch
        return 4 * patch if isinstance(patch, int) else 56
    if not isinstance(value, int) or value == 0 or "mlp_ratio" in name:
        return value
    if re.fullmatch(".*(num_key_value|num_kv)_heads|num_global_key_value_heads", name):
        num_heads = next((values[one] for one in ("num_attention_heads", "num_heads") if one in values), None)
        return NUM_HEADS if value == num_heads else min(value, NUM_KV_HEADS)
    if name in _MANY_LAYERS:
        return num_layers
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        name = "qk_rope_head_dim"
    return _by_rule(name, value)


def _by_rule(name: str, value: Any) -> Any:
    return next((small for pattern, small in _RULES if re.fullmatch(pattern, name)), value)


def _small_ids(value: Any, token_ids: dict[int, int]) -> Any:
    """Returns a small token id for each one; equal ones stay equal."""
    if isinstance(value, list | tuple):
        return [_small_ids(one, token_ids) for one in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return value
    return token_ids.setdefault(value, 3 + len(token_ids))


def _small_list(name: str, value: list[Any], values: Mapping[str, Any], num_layers: int) -> list[Any]:
    are_indices = len(value) > 2 and all(isinstance(one, int) for one in value) and len(set(value)) == len(value)
    if len(value) in [values.get(one) for one in _MANY_LAYERS] and not are_indices:
        return _kinds_of_layers(value, num_layers)
    if name in ("hidden_sizes", "downsample_channels"):
        return [HIDDEN_SIZE] * len(value)
    if re.search("layer|index|block", name) and all(isinstance(one, int) for one in value):
        return sorted({max(min(one, num_layers - 1), -num_layers) for one in value})
    if name == "image_grid_pinpoints":
        return [[56, 112], [112, 56], [112, 112]]
    if name in ("image_size", "size"):
        return [56] * len(value)
    return [_by_rule(name, one) if isinstance(one, int) else one for one in value]


def _kinds_of_layers(kinds: Sequence[Any], num_layers: int) -> list[Any]:
    """Returns every kind of layer, in the order of their first appearance. The last layer keeps its kind."""
    unique = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    chosen = [unique[index % len(unique)] for index in range(num_layers)]
    chosen[-1] = kinds[-1]
    for index, kind in enumerate(kind for kind in unique if kind not in chosen):
        chosen[index] = kind
    return chosen


def _small_rope(rope: Values) -> Values:
    """Divides the rotary dimensions of a small head among three axes."""
    small = {name: _small_rope(own) if isinstance(own, dict) else own for name, own in rope.items()}
    half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
    sections = rope.get("mrope_section", ())
    if len(sections) == 3 and sum(sections) != half:
        small["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return small
