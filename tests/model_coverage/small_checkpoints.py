"""A small checkpoint of any model type: random weights, and a processor whose tokens the configuration names."""

import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from raylens.preprocess.models.found import call_processor
from tests.model_coverage.small_configs import small_config
from tests.model_coverage.small_processors import CannotBeMadeError, small_processor

_CONTEXT = 32768
_MOST_WEIGHTS = 2 * 10**8
_SIZES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
    "spatial_merge_size": "spatial_merge_size",
}
"""Settings of a processor, with those of a vision model that they follow."""


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


@dataclass(frozen=True)
class _Settings:
    """What the defaults of a type's classes do not fit together in, as a published checkpoint has it."""

    config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    videos: dict[str, Any] = field(default_factory=dict)
    sounds: dict[str, Any] = field(default_factory=dict)


_TIMM_448 = {"model_args": {"img_size": [448, 448], "ref_feat_shape": [32, 32]}}
_LLAMA4_SIZES = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
_PARAKEET = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "projection_hidden_size": 96,
    "projection_bias": False,
}
_128_PITCHES = ("glmasr", "qwen2_5_omni_thinker", "qwen2_audio", "qwen3_omni_moe_thinker")
_SETTINGS = {
    "aya_vision": _Settings(
        {"vision_config": {"image_size": 364}},
        processor={"patch_size": 14, "downsample_factor": 2},
        images={"size": _square(364), "max_patches": 2},
    ),
    "deepseek_vl_hybrid": _Settings({"vision_config": {"image_size": 384}}),
    "emu3": _Settings(images={"min_pixels": 64 * 64, "max_pixels": 256 * 256}),
    "dots3_note": _Settings(images={"temporal_patch_size": 1}),
    "ernie4_5_vl_moe": _Settings(videos={"draw_on_frames": False}),
    "fast_vlm": _Settings(
        processor={"patch_size": 64, "vision_feature_select_strategy": "full"},
        images={"size": {"shortest_edge": 1024}, "crop_size": _square(1024)},
    ),
    "granite4_vision": _Settings(
        {
            "vision_config": {"image_size": 336, "patch_size": 14},
            "text_config": {"num_hidden_layers": 6},
            "downsample_rate": "4/8",
            "deepstack_layer_map": [[1, 0], [2, 3]],
            "spatial_target_layers": [1, 2, 4, 5],
        },
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "downsample_rate": "4/8",
        },
        images={"size": {"shortest_edge": 336}, "crop_size": _square(336)},
    ),
    "granite_docling": _Settings({"text_config": {"embedding_multiplier": 1.5, "logits_scaling": 2.0}}),
    "got_ocr2": _Settings(images={"size": _square(1024)}),
    "idefics2": _Settings(processor={"image_seq_len": 8}, images={"do_image_splitting": True}),
    "llama4": _Settings({"vision_config": {"image_size": 336, "intermediate_size": 256, **_LLAMA4_SIZES}}),
    "llava_next_video": _Settings(images={"size": {"shortest_edge": 336}, "crop_size": _square(336)}),
    "mistral_large4": _Settings(processor={"patch_size": 14, "spatial_merge_size": 2}),
    "nemotron_h_omni": _Settings({"audio_config": _PARAKEET, "audio_token_id": 0}),
    "ovis2": _Settings(images={"size": _square(224)}),
    "perception_lm": _Settings(
        {"vision_config": _TIMM_448, "projector_pooling_ratio": 2},
        processor={"patch_size": 14, "pooling_ratio": 2},
        images={"tile_size": 448, "max_num_tiles": 2, "size": _square(448)},
    ),
    **dict.fromkeys(_128_PITCHES, _Settings(sounds={"feature_size": 128})),
    "qianfan_ocr": _Settings({"vision_config": {"image_size": 448}}, images={"size": _square(448)}),
}


def save_small_checkpoint(model_type: str, folder: Path) -> None:
    own = _SETTINGS.get(model_type, _Settings())
    parts = {"image_processor": own.images, "video_processor": own.videos, "feature_extractor": own.sounds}
    processor = small_processor(model_type, own.processor, parts)
    config = small_config(model_type, keeps_images=True, changes=own.config)
    has_pictures = getattr(processor, "image_processor", None) is not None
    if has_pictures and "patch_size" not in own.processor:
        _fit(processor, config)
    text = _text_of_a_picture(processor)
    name_tokens(config, processor, text, has_pictures=has_pictures)
    seen, heard = (
        _marked(text, processor, "vision"),
        _marked(getattr(processor, "audio_token", None) or "", processor, "audio"),
    )
    processor.chat_template = (
        "{%- for message in messages -%}{%- for part in message['content'] -%}"
        f"{{%- if part['type'] == 'image' -%}}{{{{- {json.dumps(seen)} + ';' -}}}}"
        f"{{%- elif part['type'] == 'audio' -%}}{{{{- {json.dumps(heard)} + ';' -}}}}"
        "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endfor -%}"
    )
    # The calls so far have left settings that a published tokenizer does not have.
    processor.tokenizer.backend_tokenizer.no_padding()
    processor.save_pretrained(folder)
    save_random_model(model_type, config, folder)


def _fit(processor: Any, config: Any) -> None:
    """Gives the processor the sizes of patches of the configuration."""
    vision = getattr(config, "vision_config", config)
    for part in (processor, processor.image_processor):
        for name, setting in _SIZES.items():
            value = getattr(vision, setting, None)
            if hasattr(part, name) and isinstance(value, int):
                setattr(part, name, value)


def save_with_a_talker(thinker: Path, folder: Path) -> None:
    """Copies the checkpoint of an Omni model's thinker in the form of the published ones, which speak, too."""
    for file in thinker.iterdir():
        shutil.copy(file, folder)
    settings = json.loads((thinker / "config.json").read_text())
    model_type = settings["model_type"].removesuffix("_thinker")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "thinker_config": settings}))
    weights = {f"thinker.{name}": weight for name, weight in load_file(thinker / "model.safetensors").items()}
    weights["talker.codec_head.weight"] = torch.zeros(4, 4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _marked(text: str, processor: Any, kind: str) -> str:
    return text.join(str(getattr(processor, f"{kind}_{edge}_token", "")) for edge in ("bos", "eos"))


def _text_of_a_picture(processor: Any) -> str:
    names = ("image_placeholder_token", "image_token", "boi_token")
    text: str = next((one for name in names if isinstance(one := getattr(processor, name, None), str)), "")
    if type(processor).__name__ == "HunYuanVLProcessor":
        return f"{processor.image_start_token}{text}{processor.image_end_token}"
    if type(processor).__name__ == "PPChart2TableProcessor":
        return "<imgpad>" * 256
    return text


def name_tokens(config: PreTrainedConfig, processor: Any, text: str, *, has_pictures: bool = True) -> None:
    """Gives the configuration the tokens of the processor. The most frequent token of a picture is the placeholder."""
    vocab: dict[str, int] = processor.tokenizer.get_vocab()
    text_config: Any = config.get_text_config()
    text_config.max_position_embeddings = _CONTEXT
    text_config.vocab_size = max(len(vocab), text_config.vocab_size)
    for name in vars(config):
        role = name.removesuffix("_id").removesuffix("_index").removesuffix("_token")
        other = role.replace("start", "bos").replace("end", "eos")
        token = getattr(processor, f"{role}_token", None) or getattr(processor, f"{other}_token", None)
        if name.endswith(("_id", "_token_index")) and isinstance(token, str) and token in vocab:
            setattr(config, name, vocab[token])
    if not has_pictures:
        return
    picture = Image.fromarray(np.zeros((300, 400, 3), dtype=np.uint8))
    ids = np.asarray(call_processor(processor, text, [picture])["input_ids"][0])
    values, counts = np.unique(ids, return_counts=True)
    if not len(values):
        raise CannotBeMadeError("its processor puts no tokens for a picture into a prompt")
    config.image_token_id = int(values[counts.argmax()])
    if hasattr(config, "vocabulary_map"):
        config.vocabulary_map["<image>"] = config.image_token_id


def save_random_model(model_type: str, config: PreTrainedConfig, folder: Path) -> None:
    """Weights are spread out more than transformers draws them: answers must depend on the picture."""
    # With tied ones every token would repeat itself.
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    torch.manual_seed(0)
    whole = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type])
    with torch.device("meta"):
        num_weights = sum(one.numel() for one in whole._from_config(copy.deepcopy(config)).parameters())
    if num_weights > _MOST_WEIGHTS:
        raise CannotBeMadeError(f"{num_weights} weights are left with the settings that most types share made small")
    model: PreTrainedModel = whole._from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.save_pretrained(folder)


def spread_weights(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, own in sorted(model.named_parameters()):
            if own.ndim >= 2:
                spread = (1.5 if own.ndim < 4 else 1.0) * own[0].numel() ** -0.5
                spread = 1.0 if "embed_tokens" in name else spread
                own.copy_(torch.randn(own.shape, generator=generator) * spread)
            elif own.numel():
                own.add_(torch.randn(own.shape, generator=generator) * 0.1)
