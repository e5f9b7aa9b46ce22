"""Small Hugging Face processor checkpoints of each model family, made on the spot."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from raylens.modeling.model_configs import register_model_configs
from tests.preprocess.small_tokenizers import (
    BOS,
    CONTROL,
    EOS,
    PAD,
    Prefix,
    Vocabulary,
    small_tokenizer,
    unigram_tokenizer,
)

__all__ = ["FAMILIES", "VIDEO_FAMILIES", "Vocabulary", "family_chat_template", "prompt_placeholder", "save_processor"]

Json = dict[str, Any]

_WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_GRID_TOKENS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
_QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_LOCATION_TOKENS = tuple(f"<loc{i:04}>" for i in range(1024)) + tuple(f"<seg{i:03}>" for i in range(128))
_CODES = tuple("IMGIMG" + "".join(chr(65 + int(digit)) for digit in str(code)) + "Z" for code in range(16))
# The model's last ids, for which it has embeddings of their own.
_MOLMO_TOKENS: tuple[str, ...] = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>")
_MOLMO_TOKENS += ("<|image|>", "<im_low>", "<frame_start>", "<frame_end>", "<|video|>")


@dataclass(frozen=True)
class _Family:
    """What makes one family's checkpoint; `tokens` without a name are no attributes of the tokenizer. `processor` is
    the name of a class in transformers and `images` its image processor's settings, None for a family without."""

    processor: str | None
    config: Callable[[Tokenizer], Json]
    images: Json | None
    settings: Json = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    image: str = "<image>"
    video: str = ""
    videos: Json | None = None
    prefix: Prefix = "first"
    bos: bool = True
    tokenizer_settings: Json = field(default_factory=dict)


def save_processor(model_type: str, vocabulary: Vocabulary, folder: Path, *, chat_template: bool = True) -> str:
    """Writes the family's checkpoint, without weights, into `folder`, and returns its path."""
    family = _FAMILIES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(model_type, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    register_model_configs()
    AutoConfig.for_model(model_type, **family.config(tokenizer)).save_pretrained(folder)
    files = {"tokenizer_config.json": _tokenizer_config(family), "video_preprocessor_config.json": family.videos}
    if family.images is not None:
        files["processor_config.json"] = {"processor_class": family.processor, **family.settings}
        files["preprocessor_config.json"] = {"processor_class": family.processor, **family.images}
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content, indent=1))
    if chat_template:
        (folder / "chat_template.jinja").write_text(family_chat_template(model_type))
    return str(folder)


def prompt_placeholder(model_type: str, modality: str = "image") -> str:
    """What a text prompt has in the place of one image or video; nothing where the processor inserts by itself."""
    family = _FAMILIES[model_type]
    return {"image": family.image, "video": family.video}[modality]


def _tokenizer(model_type: str, vocabulary: Vocabulary) -> Tokenizer:
    family = _FAMILIES[model_type]
    tokens = (*family.named.values(), *family.tokens)
    if model_type == "fuyu":
        return unigram_tokenizer(vocabulary, tokens)
    # The byte-level tokenizers of these two (SmolLM's) add no BOS.
    bos = family.bos and not (vocabulary == "byte_level" and model_type in ("idefics3", "smolvlm"))
    return small_tokenizer(vocabulary, tokens, family.texts, prefix=family.prefix, bos=bos)


def _tokenizer_config(family: _Family) -> Json:
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), CONTROL, strict=True))
    standard = {name: token for name, token in family.named.items() if name == "sep_token"}
    return {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {name: token for name, token in family.named.items() if name not in standard},
        **names,
        **standard,
        **family.tokenizer_settings,
    }


def family_chat_template(model_type: str) -> str:
    image, video = (json.dumps(prompt_placeholder(model_type, modality)) for modality in ("image", "video"))
    opening = "{{- bos_token -}}" if model_type == "mllama" else ""
    return (
        f"{opening}"
        "{%- for message in messages -%}{{- message['role'] + ': ' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}"
        f"{{%- if part['type'] == 'image' -%}}{{{{- {image} -}}}}"
        f"{{%- elif part['type'] == 'video' -%}}{{{{- {video} -}}}}"
        "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
    )


def _ids(tokenizer: Tokenizer) -> Json:
    names = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def _text(model_type: str, tokenizer: Tokenizer, **more: Any) -> Json:
    shape = {"num_key_value_heads": 2, "max_position_embeddings": 8192, "vocab_size": tokenizer.get_vocab_size()}
    return {"model_type": model_type, **_WIDTH, **shape, **_ids(tokenizer), **more}


def _vision(model_type: str, size: int = 56, **more: Any) -> Json:
    return {"model_type": model_type, **_WIDTH, "image_size": size, "patch_size": 14, **more}


def _square(size: int) -> Json:
    return {"height": size, "width": size}


def _cropped(size: int) -> Json:
    return {"size": {"shortest_edge": size}, "crop_size": _square(size)}


def _pinpoints(size: int, shapes: list[tuple[int, int]]) -> list[list[int]]:
    return [[rows * size, columns * size] for rows, columns in shapes]


_NEXT_PINPOINTS = _pinpoints(42, [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)])
_ONEVISION_PINPOINTS = _pinpoints(42, [(rows, columns) for rows in range(1, 5) for columns in range(1, 5)])


def _llava(tokenizer: Tokenizer) -> Json:
    return {
        "text_config": _text("llama", tokenizer),
        "vision_config": _vision("clip_vision_model", projection_dim=32),
        "image_token_index": tokenizer.token_to_id("<image>"),
        "image_seq_length": 16,
    }


def _vipllava(tokenizer: Tokenizer) -> Json:
    return {**_llava(tokenizer), "vision_feature_layer": [-1, -2]}


def _llava_next(tokenizer: Tokenizer) -> Json:
    vision = _vision("clip_vision_model", 42, projection_dim=32)
    return {**_llava(tokenizer), "vision_config": vision, "image_grid_pinpoints": _NEXT_PINPOINTS}


def _llava_onevision(tokenizer: Tokenizer) -> Json:
    return {
        "text_config": _text("qwen2", tokenizer),
        "vision_config": _vision("siglip_vision_model", 42, vision_use_head=False),
        "image_token_index": tokenizer.token_to_id("<image>"),
        "video_token_index": tokenizer.token_to_id("<video>"),
        "image_grid_pinpoints": _ONEVISION_PINPOINTS,
        "vision_aspect_ratio": "anyres_max_4",
    }


def _qwen(tokenizer: Tokenizer, text: str, **vision: Any) -> Json:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return {
        "text_config": _text(text, tokenizer, rope_parameters=rope, head_dim=8),
        "vision_config": {"depth": 2, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }


def _qwen2_vl(tokenizer: Tokenizer) -> Json:
    return _qwen(tokenizer, "qwen2_vl_text", patch_size=14, embed_dim=32, hidden_size=32)


def _colqwen2(tokenizer: Tokenizer) -> Json:
    return {"vlm_config": {"model_type": "qwen2_vl", **_qwen2_vl(tokenizer)}, "embedding_dim": 8}


def _colpali(tokenizer: Tokenizer) -> Json:
    vlm = {"model_type": "paligemma", **_paligemma(tokenizer)}
    return {"vlm_config": vlm, "text_config": vlm["text_config"], "embedding_dim": 8}


def _qwen2_5_vl(tokenizer: Tokenizer) -> Json:
    more = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 56}
    return _qwen(tokenizer, "qwen2_5_vl_text", patch_size=14, fullatt_block_indexes=[1], **more)


def _qwen3_vl(tokenizer: Tokenizer) -> Json:
    more = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
    return _qwen(tokenizer, "qwen3_vl_text", patch_size=16, deepstack_visual_indexes=[0], **more)


def _qwen3_vl_moe(tokenizer: Tokenizer) -> Json:
    settings = _qwen3_vl(tokenizer)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return {**settings, "text_config": {**settings["text_config"], "model_type": "qwen3_vl_moe_text", **experts}}


_LINEAR: Json = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _qwen3_5(tokenizer: Tokenizer) -> Json:
    settings = _qwen3_vl(tokenizer)
    vision = {name: value for name, value in settings["vision_config"].items() if "deepstack" not in name}
    rope = {**settings["text_config"]["rope_parameters"], "partial_rotary_factor": 1.0}
    text = {**settings["text_config"], **_LINEAR, "model_type": "qwen3_5_text", "rope_parameters": rope}
    return {**settings, "vision_config": vision, "text_config": text}


def _qwen3_5_moe(tokenizer: Tokenizer) -> Json:
    settings = _qwen3_5(tokenizer)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    experts["shared_expert_intermediate_size"] = 48
    return {**settings, "text_config": {**settings["text_config"], "model_type": "qwen3_5_moe_text", **experts}}


def _fuyu(tokenizer: Tokenizer) -> Json:
    sizes = {"image_size": 90, "patch_size": 15, "image_token_id": tokenizer.token_to_id("|SPEAKER|")}
    return {"text_config": _text("persimmon", tokenizer), **sizes}


def _blip_2(tokenizer: Tokenizer) -> Json:
    text = _text("opt", tokenizer, ffn_dim=64, word_embed_proj_dim=32)
    qformer = {**_WIDTH, "encoder_hidden_size": 32, "vocab_size": 64}
    image = {"num_query_tokens": 4, "image_token_index": tokenizer.token_to_id("<image>")}
    vision = _vision("blip_2_vision_model")
    return {"text_config": text, "qformer_config": qformer, "vision_config": vision, **image}


def _chameleon(tokenizer: Tokenizer) -> Json:
    shape = {"embed_dim": 8, "num_embeddings": len(_CODES), "latent_channels": 8, "resolution": 64}
    vocabulary = {token: tokenizer.token_to_id(token) for token in ("<image>", *_CODES)}
    text = {name: value for name, value in _text("chameleon", tokenizer).items() if name != "model_type"}
    vq = {**shape, "base_channels": 32, "num_res_blocks": 1}
    return {**text, "vq_config": vq, "vocabulary_map": vocabulary}


def _molmo2(tokenizer: Tokenizer) -> Json:
    base = tokenizer.get_vocab_size() - len(_MOLMO_TOKENS)
    heads = {"num_key_value_heads": 4, "head_dim": 8}
    text = _text("molmo2_text", tokenizer, head_dim=8) | {"vocab_size": base}
    vision = _vision("molmo2_vision", **heads) | {"image_size": [70, 70], "num_position_embeddings": 25}
    adapter = {name: value for name, value in (_WIDTH | heads).items() if name != "num_hidden_layers"}
    tokens = {
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "image_end_token_id": "<im_end>",
        "image_patch_id": "<im_patch>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    }
    return {
        "text_config": {**text, "additional_vocab_size": len(_MOLMO_TOKENS)},
        "vision_config": vision,
        "adapter_config": {**adapter, "text_hidden_size": 32, "vision_feature_layer": [-1, -2]},
        **{name: tokenizer.token_to_id(token) for name, token in tokens.items()},
    }


def _idefics3(tokenizer: Tokenizer, vision: str = "idefics3_vision") -> Json:
    return {
        "text_config": _text("llama", tokenizer),
        "vision_config": _vision(vision),
        "image_token_id": tokenizer.token_to_id("<image>"),
        "scale_factor": 2,
    }


def _smolvlm(tokenizer: Tokenizer) -> Json:
    return _idefics3(tokenizer, "smolvlm_vision")


def _internvl(tokenizer: Tokenizer) -> Json:
    vision = _vision("internvl_vision") | {"image_size": [56, 56], "patch_size": [14, 14]}
    image = {"image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>"), "image_seq_length": 4}
    return {"text_config": _text("qwen2", tokenizer), "vision_config": vision, **image}


def _mistral3(tokenizer: Tokenizer) -> Json:
    return {
        "text_config": _text("mistral", tokenizer, head_dim=8),
        "vision_config": _vision("pixtral", 112, head_dim=8),
        "image_token_index": tokenizer.token_to_id("[IMG]"),
        "spatial_merge_size": 2,
    }


def _minicpmv4_6(tokenizer: Tokenizer) -> Json:
    text = _text("qwen3_5_text", tokenizer, head_dim=8, **_LINEAR)
    return {
        "text_config": text,
        "vision_config": _vision("minicpmv4_6_vision", patch_size=7),
        "insert_layer_id": 0,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
    }


def _minicpm_ocr(tokenizer: Tokenizer) -> Json:
    settings = _minicpmv4_6(tokenizer)
    return {**settings, "vision_config": _vision("minicpm_ocr_vision", patch_size=7)}


def _minicpmv4_7(tokenizer: Tokenizer) -> Json:
    settings = _minicpmv4_6(tokenizer)
    marks = {"image_start_id": "<image>", "image_end_id": "</image>"}
    marks |= {"slice_start_id": "<slice>", "slice_end_id": "</slice>"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return {
        **settings,
        "text_config": {**settings["text_config"], "rope_parameters": rope},
        "vision_config": _vision("minicpmv4_7_vision", patch_size=7),
        **{name: tokenizer.token_to_id(token) for name, token in marks.items()},
        "newline_id": tokenizer.encode("\n", add_special_tokens=False).ids[0],
    }


def _gemma3(tokenizer: Tokenizer) -> Json:
    tokens = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    tokens["image_token_index"] = "<image_soft_token>"
    return {
        "text_config": _text("gemma3_text", tokenizer, head_dim=8, query_pre_attn_scalar=8, sliding_window=64),
        "vision_config": _vision("siglip_vision_model", vision_use_head=False),
        "mm_tokens_per_image": 4,
        **{name: tokenizer.token_to_id(token) for name, token in tokens.items()},
    }


def _gemma3n(tokenizer: Tokenizer) -> Json:
    vocab_size = tokenizer.get_vocab_size()
    # As in the real one: tokens from the end of a picture on have no place in the text's tables.
    vocabulary = tokenizer.get_vocab()
    first_vision, first_audio = vocabulary["<end_of_image>"], vocabulary["<end_of_audio>"]
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": first_vision}
    layers: Json = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    layers |= {"altup_num_inputs": 2, "laurel_rank": 4}
    audio: Json = {"hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1}
    audio |= {"sscp_conv_channel_size": [8, 4], "vocab_size": vocab_size - first_audio, "vocab_offset": first_audio}
    vision = {"vocab_size": first_audio - first_vision, "vocab_offset": first_vision, "model_args": _MOBILENET}
    tokens = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    tokens |= {"boa": "<start_of_audio>", "eoa": "<end_of_audio>", "audio": "<audio_soft_token>"}
    return {
        "text_config": _text("gemma3n_text", tokenizer, head_dim=8, sliding_window=64, **per_layer, **layers),
        "vision_config": vision,
        "audio_config": audio,
        "vision_soft_tokens_per_image": 16,
        "audio_soft_tokens_per_image": 16,
        **{f"{name}_token_id": tokenizer.token_to_id(token) for name, token in tokens.items()},
    }


def _paligemma(tokenizer: Tokenizer) -> Json:
    shape = {"hidden_size": 32, "projection_dim": 32, "vocab_size": tokenizer.get_vocab_size()}
    vision = _vision("siglip_vision_model", vision_use_head=False, projection_dim=32)
    image = {"image_token_index": tokenizer.token_to_id("<image>")}
    return {"text_config": _text("gemma", tokenizer, head_dim=8), "vision_config": vision, **shape, **image}


def _deepseek_vl(tokenizer: Tokenizer) -> Json:
    vision = _vision("siglip_vision_model", vision_use_head=False)
    image = {"image_token_id": tokenizer.token_to_id("<image_placeholder>")}
    return {"text_config": _text("llama", tokenizer), "vision_config": vision, **image}


def _janus(tokenizer: Tokenizer) -> Json:
    vision = _vision("janus_vision_model", num_image_tokens=16, projection_dim=32, mlp_ratio=2.0)
    codes = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1}
    vq = {**codes, "projection_dim": 32, "image_token_embed_dim": 32}
    return {**_deepseek_vl(tokenizer), "vision_config": vision, "vq_config": vq}


def _aria(tokenizer: Tokenizer) -> Json:
    return {
        "text_config": _text("aria_text", tokenizer, head_dim=8, moe_num_experts=4, moe_topk=2),
        "vision_config": _vision("idefics3_vision", 980),
        "projector_patch_to_query_dict": {"1225": 8, "4900": 16},
        "image_token_index": tokenizer.token_to_id("<|img|>"),
    }


def _phi4_multimodal(tokenizer: Tokenizer) -> Json:
    text = {name: value for name, value in _text("phi4_multimodal", tokenizer).items() if name != "model_type"}
    # A prompt with one picture has the short form, one with two has the long form.
    text["original_max_position_embeddings"] = 500
    text["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 500,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 1.5, 2.0, 4.0],
    }
    channels = ("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels")
    audio = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4}
    audio |= dict.fromkeys(channels, 32)
    image_id, audio_id = (tokenizer.token_to_id(token) for token in ("<|image|>", "<|audio|>"))
    vision = _vision("phi4_multimodal_vision", 448, crop_size=448, image_token_id=image_id)
    return {**text, "vision_config": vision, "audio_config": {**audio, "audio_token_id": audio_id}}


def _florence2(tokenizer: Tokenizer) -> Json:
    # As in its checkpoints, no stage attends in one group: that takes another product for one picture than for several.
    heads = {"embed_dim": [8, 16, 16, 32], "num_heads": [1, 2, 2, 4], "num_groups": [2, 2, 2, 4]}
    side = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
    text: Json = {f"{end}_{name}": value for end in ("encoder", "decoder") for name, value in side.items()}
    text |= {"model_type": "bart", "d_model": 32, "vocab_size": tokenizer.get_vocab_size(), **_ids(tokenizer)}
    vision = {"depths": [1, 2, 1, 1], **heads, "window_size": 4, "projection_dim": 32}
    image_id = tokenizer.token_to_id("<image>")
    return {"text_config": text, "vision_config": vision, "image_token_id": image_id, **_ids(tokenizer)}


def _wemm(tokenizer: Tokenizer) -> Json:
    downsampler = {"visual_hidden_size": 32, "llm_hidden_size": 32, "kernel_size": 4, "stride": 4, "bias": True}
    return {
        # As published, and as the code beside the published weights spells them.
        "text_config": _text("internlm2", tokenizer, plora_rank=8, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "vision_config": _vision("Idefics2VisionConfig", 140),
        "downsampler_config": {**downsampler, "depth": 2, "hidden_act": "gelu"},
        "spliter_emb_config": {"num_embeddings": 2, "embedding_dim": 32},
        "image_processor": {"size": {"shortest_edge": 50, "longest_edge": 150}},
    }


def _mllama(tokenizer: Tokenizer) -> Json:
    # As in its checkpoints, the token of a picture is the one behind the vocabulary.
    image_id = tokenizer.token_to_id("<|image|>")
    text = _text("mllama_text_model", tokenizer, num_hidden_layers=4, cross_attention_layers=[1, 3])
    vision: Json = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 4, "image_size": 28, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
    return {"text_config": {**text, "vocab_size": image_id}, "vision_config": vision, "image_token_index": image_id}


_IDEFICS_IMAGES = {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}, **_HALF}
_IDEFICS_NAMES = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_QWEN: Json = {
    "tokens": _QWEN_TOKENS,
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "bos": False,
}
_QWEN2_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2},
}
_QWEN2_VIDEOS = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 4 * 28**2, "longest_edge": 12 * 28**2},
    "fps": 2,
    "max_frames": 8,
}
_QWEN3_IMAGES = _QWEN2_IMAGES | {"patch_size": 16, "size": {"shortest_edge": 4 * 32**2, "longest_edge": 16 * 32**2}}
_QWEN3_VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 16 * 32**2, "longest_edge": 64 * 32**2},
    "max_frames": 8,
}

# Of each kind of block that MobileNetV5 has, as timm describes them, in fewer channels.
_UIR = {"block_type": "uir", "stride": 2, "dw_kernel_size_start": 5, "dw_kernel_size_mid": 5, "dw_kernel_size_end": 0}
_UIR |= {"exp_ratio": 4.0, "se_ratio": 0.0, "noskip": False, "act_layer": None}
_ER = {"block_type": "er", "stride": 2, "exp_kernel_size": 3, "pw_kernel_size": 1, "exp_ratio": 4.0, "force_in_chs": 0}
_ER |= {"se_ratio": 0.0, "noskip": False, "act_layer": None}
_MQA = {"block_type": "mqa", "stride": 1, "dw_kernel_size": 3, "num_heads": 4, "key_dim": 16, "value_dim": 16}
_MQA |= {"kv_stride": 2, "noskip": False, "act_layer": None}
_FFN = _UIR | {"stride": 1, "dw_kernel_size_start": 0, "dw_kernel_size_mid": 0}
_MOBILENET: Json = {
    "block_args": [
        [{**_ER, "out_chs": 16}],
        [{**_UIR, "out_chs": 32}],
        [{**_UIR, "out_chs": 48}, {**_MQA, "out_chs": 48}, {**_FFN, "out_chs": 48}],
        [{**_UIR, "out_chs": 64}, {**_MQA, "out_chs": 64, "kv_stride": 1}, {**_FFN, "out_chs": 64}],
    ],
    "msfa_output_resolution": 4,
}

_SLICES: Json = {"scale_resolution": 56, "patch_size": 7, "max_slice_nums": 4, **_HALF}
_MINICPM: Json = {
    "named": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    "tokens": ("<|im_start|>", "<|im_end|>"),
    "image": "<|image_pad|>",
    "bos": False,
}

_FAMILIES = {
    "llava": _Family(
        "LlavaProcessor",
        _llava,
        {"image_processor_type": "CLIPImageProcessor", **_cropped(56)},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        named={"image_token": "<image>"},
        prefix="legacy",
    ),
    "vipllava": _Family(
        "LlavaProcessor",
        _vipllava,
        {"image_processor_type": "CLIPImageProcessor", **_cropped(56)},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        named={"image_token": "<image>"},
        prefix="legacy",
    ),
    "llava_next": _Family(
        "LlavaNextProcessor",
        _llava_next,
        {
            "image_processor_type": "LlavaNextImageProcessor",
            **_cropped(42),
            "image_grid_pinpoints": _NEXT_PINPOINTS,
        },
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        named={"image_token": "<image>"},
    ),
    "llava_onevision": _Family(
        "LlavaOnevisionProcessor",
        _llava_onevision,
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _square(42),
            "image_grid_pinpoints": _ONEVISION_PINPOINTS,
        },
        {"num_image_tokens": 9, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_4"},
        named={"image_token": "<image>", "video_token": "<video>"},
        tokens=("<|im_start|>", "<|im_end|>"),
        video="<video>",
        videos={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": _square(42)},
        bos=False,
    ),
    "qwen2_vl": _Family("Qwen2VLProcessor", _qwen2_vl, _QWEN2_IMAGES, videos=_QWEN2_VIDEOS, **_QWEN),
    "colqwen2": _Family("ColQwen2Processor", _colqwen2, _QWEN2_IMAGES, **_QWEN),
    "qwen2_5_vl": _Family("Qwen2_5_VLProcessor", _qwen2_5_vl, _QWEN2_IMAGES, videos=_QWEN2_VIDEOS, **_QWEN),
    "qwen3_vl": _Family("Qwen3VLProcessor", _qwen3_vl, _QWEN3_IMAGES, videos=_QWEN3_VIDEOS, **_QWEN),
    "qwen3_5": _Family("Qwen3VLProcessor", _qwen3_5, _QWEN3_IMAGES, videos=_QWEN3_VIDEOS, **_QWEN),
    "qwen3_5_moe": _Family("Qwen3VLProcessor", _qwen3_5_moe, _QWEN3_IMAGES, videos=_QWEN3_VIDEOS, **_QWEN),
    "qwen3_vl_moe": _Family("Qwen3VLProcessor", _qwen3_vl_moe, _QWEN3_IMAGES, videos=_QWEN3_VIDEOS, **_QWEN),
    "fuyu": _Family(
        "FuyuProcessor",
        _fuyu,
        {
            "image_processor_type": "FuyuImageProcessor",
            "size": {"height": 60, "width": 90},
            "patch_size": _square(15),
        },
        tokens=("|SPEAKER|", "|NEWLINE|", "|ENDOFTEXT|", *(f"<0x0{i}>" for i in range(5))),
        image="",
    ),
    "blip-2": _Family(
        "Blip2Processor",
        _blip_2,
        {"image_processor_type": "BlipImageProcessor", "size": _square(56)},
        {"num_query_tokens": 4},
        tokens=("<image>",),
        image="",
    ),
    "chameleon": _Family(
        "ChameleonProcessor",
        _chameleon,
        {"image_processor_type": "ChameleonImageProcessor", **_cropped(64)},
        {"image_seq_length": 16, "image_token": "<image>"},
        named={"sep_token": "<reserved08706>"},
        tokens=("<image>", "<racm3:break>", "<eoss>", *_CODES),
    ),
    "molmo2": _Family(
        "Molmo2Processor",
        _molmo2,
        {
            "image_processor_type": "Molmo2ImageProcessor",
            "size": _square(70),
            "max_crops": 4,
            "overlap_margins": [1, 1],
        },
        tokens=("<|im_start|>", "<|im_end|>", *_MOLMO_TOKENS),
        image="<|image|>",
        video="<|video|>",
        videos={"video_processor_type": "Molmo2VideoProcessor", "size": _square(70), "num_frames": 6},
        bos=False,
    ),
    "idefics3": _Family(
        "Idefics3Processor",
        _idefics3,
        {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS_IMAGES},
        {"image_seq_len": 4},
        tokens=(*_IDEFICS_NAMES.values(), *_GRID_TOKENS),
    ),
    "smolvlm": _Family(
        "SmolVLMProcessor",
        _smolvlm,
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS_IMAGES},
        {"image_seq_len": 4},
        named=_IDEFICS_NAMES,
        tokens=_GRID_TOKENS,
        video="<video>",
        videos={
            "video_processor_type": "SmolVLMVideoProcessor",
            **_IDEFICS_IMAGES,
            "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 56}},
        },
    ),
    "internvl": _Family(
        "InternVLProcessor",
        _internvl,
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _square(56),
            "crop_to_patches": True,
            "max_patches": 4,
        },
        {"image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        tokens=("<|im_start|>", "<|im_end|>"),
        image="<IMG_CONTEXT>",
        video="<video>",
        videos={"video_processor_type": "InternVLVideoProcessor", "size": _square(56)},
        bos=False,
    ),
    "mistral3": _Family(
        "PixtralProcessor",
        _mistral3,
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": _square(14),
        },
        {"patch_size": 14, "spatial_merge_size": 2},
        tokens=("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
    ),
    "minicpm_ocr": _Family(
        "MiniCPMOcrProcessor",
        _minicpm_ocr,
        {"image_processor_type": "MiniCPMOcrImageProcessor", **_SLICES},
        **_MINICPM,
    ),
    "minicpmv4_6": _Family(
        "MiniCPMV4_6Processor",
        _minicpmv4_6,
        {"image_processor_type": "MiniCPMV4_6ImageProcessor", **_SLICES},
        **_MINICPM,
    ),
    "minicpmv4_7": _Family(
        "MiniCPMV4_7Processor",
        _minicpmv4_7,
        {"image_processor_type": "MiniCPMV4_6ImageProcessor", **_SLICES},
        **_MINICPM,
    ),
    "gemma3": _Family(
        "Gemma3Processor",
        _gemma3,
        {"image_processor_type": "Gemma3ImageProcessor", "size": _square(56)},
        {"image_seq_length": 4},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        tokens=("<start_of_turn>", "<end_of_turn>"),
        image="<start_of_image>",
        prefix="never",
    ),
    # In pictures smaller than this its convolutions make other last bits of one picture than of several.
    "gemma3n": _Family(
        "Gemma3nProcessor",
        _gemma3n,
        {
            "image_processor_type": "SiglipImageProcessor",
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "size": _square(128),
            "do_normalize": False,
        },
        {"image_seq_length": 16, "audio_seq_length": 16},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        tokens=("<start_of_turn>", "<end_of_turn>"),
        image="<image_soft_token>",
        prefix="never",
    ),
    "wemm": _Family(
        None,
        _wemm,
        None,
        tokens=("<|im_start|>", "<|im_end|>"),
        tokenizer_settings={
            "tokenizer_class": "InternLM2Tokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        },
    ),
    "paligemma": _Family(
        "PaliGemmaProcessor",
        _paligemma,
        {"image_processor_type": "SiglipImageProcessor", "size": _square(56), "image_seq_length": 16},
        named={"image_token": "<image>"},
        texts=_LOCATION_TOKENS,
        prefix="never",
    ),
    "colpali": _Family(
        "ColPaliProcessor",
        _colpali,
        {"image_processor_type": "SiglipImageProcessor", "size": _square(56), "image_seq_length": 16},
        named={"image_token": "<image>"},
        texts=_LOCATION_TOKENS,
        prefix="never",
    ),
    "deepseek_vl": _Family(
        "DeepseekVLProcessor",
        _deepseek_vl,
        {"image_processor_type": "DeepseekVLImageProcessor", "size": _square(56), **_HALF},
        {"num_image_tokens": 16},
        named={"image_token": "<image_placeholder>"},
        image="<image_placeholder>",
    ),
    "janus": _Family(
        "JanusProcessor",
        _janus,
        {"image_processor_type": "JanusImageProcessor", "size": _square(56), **_HALF},
        {"num_image_tokens": 16},
        named={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        image="<image_placeholder>",
    ),
    # Its image processor knows no sizes but 490 and 980.
    "aria": _Family(
        "AriaProcessor",
        _aria,
        {"image_processor_type": "AriaImageProcessor"},
        {"size_conversion": {"490": 8, "980": 16}},
        named={"image_token": "<|img|>"},
        tokens=("<|im_start|>", "<|im_end|>"),
        image="<|img|>",
    ),
    # Its image processor counts tokens for tiles of 448 pixels only.
    "phi4_multimodal": _Family(
        "Phi4MultimodalProcessor",
        _phi4_multimodal,
        {
            "image_processor_type": "Phi4MultimodalImageProcessor",
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
            "dynamic_hd": 4,
        },
        named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
        tokens=("<|user|>", "<|assistant|>", "<|end|>"),
        image="<|image|>",
        bos=False,
    ),
    "mllama": _Family(
        "MllamaProcessor",
        _mllama,
        {"image_processor_type": "MllamaImageProcessor", "size": _square(28), "max_image_tiles": 4},
        tokens=("<|python_tag|>", "<|image|>"),
        image="<|image|>",
    ),
    "florence2": _Family(
        "Florence2Processor",
        _florence2,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": _square(64),
            "do_center_crop": False,
            "image_seq_length": 5,
        },
        named={"image_token": "<image>"},
        image="",
        # Its processor puts the text behind BOS before it is tokenised. From the ids of a text to which the tokenizer
        # adds a space none can tell whether the text had one; Florence-2's own tokenizer adds none.
        prefix="never",
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
VIDEO_FAMILIES: frozenset[str] = frozenset(name for name, family in _FAMILIES.items() if family.videos is not None)
