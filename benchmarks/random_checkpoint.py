"""Checkpoints of random weights: small ones that exceed a CPU's caches, and some as wide as those of 7B models, with
fewer language layers, made on the device in seconds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoProcessor,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)

from benchmarks.gpu_limits import dtype_of
from raylens.checkpoints import BUNDLED_MODEL
from tests.preprocess.small_processors import save_processor

TEXT_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
_QWEN_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "out_hidden_size": TEXT_CONFIG["hidden_size"],
    "window_size": 112,
    "fullatt_block_indexes": [3],
}
LLAVA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32064,
    "max_position_embeddings": 8192,
}
"""The language half of LLaVA 1.5 7B, except for the positions."""
LANGUAGE_LAYERS = {"llava": {"language": 8, "of": 32}, "qwen2_5_vl": {"language": 7, "of": 28}}
"""By model: the number of language layers here, and in the 7B model."""

_LLAVA_TEXT: dict[str, Any] = LLAVA_7B | {"max_position_embeddings": 4096, "tie_word_embeddings": False}
_CLIP_L: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "projection_dim": 768,
}
_CLIP_SIDE = 336
_QWEN_7B_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_QWEN_7B_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_HALF_OF_A_HEAD = (16, 24, 24)
_QWEN_MAX_PIXELS = 1280 * 28 * 28  # Qwen's recommended value; a large square becomes 35 x 35 tokens


@dataclass(frozen=True)
class Scale:
    """The size of a checkpoint. `vision`: changed settings of the tower of the bundled model, or of the smallest
    Qwen2.5-VL. `mrope_section`: of a Qwen2.5-VL, half a head's size. The weights are made on `device`."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


SMALL_LLAVA, _SMALL_QWEN = Scale(TEXT_CONFIG, {}), Scale(TEXT_CONFIG, _QWEN_VISION)


_PUBLISHED_TEXT = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 76000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""The language half of Qwen2.5-VL with 1.5 B parameters. Head and embeddings, here apart, have as many as its tied
ones."""
_PUBLISHED_VISION = {
    "depth": 8,
    "hidden_size": 640,
    "intermediate_size": 1710,
    "num_heads": 8,
    "out_hidden_size": 1536,
    "window_size": 112,
    "fullatt_block_indexes": [7],
}
PUBLISHED = Scale(_PUBLISHED_TEXT, _PUBLISHED_VISION, (16, 24, 24), dtype=torch.bfloat16)
"""1.6 B parameters, as people publish them."""


def make_checkpoint(folder: Path, *, image_size: int | None = None, scale: Scale = SMALL_LLAVA) -> int:
    """Writes a LLaVA and the bundled model's processor to `folder`. Returns the language half's number of parameters,
    by default about 40 million.

    The weights have a spread at which answers depend on the prompt. Each token of an answer is visible text, so that a
    client sees its arrival. `image_size`: side of a picture in pixels instead of the bundled model's 96, in patches of
    14 pixels instead of 16. Each patch is a token.
    """
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for name, value in scale.text.items():
        setattr(config.text_config, name, value)
    for name, value in scale.vision.items():
        setattr(config.vision_config, name, value)
    config.tie_word_embeddings = False
    processor = AutoProcessor.from_pretrained(BUNDLED_MODEL)
    if image_size is not None:
        config.vision_config.image_size, config.vision_config.patch_size = image_size, 14
        config.image_seq_length = (image_size // 14) ** 2
        square = {"height": image_size, "width": image_size}
        processor.image_processor.size, processor.image_processor.crop_size = square, square
        processor.patch_size = 14
    count = _save(_drawn(LlavaForConditionalGeneration, config, scale), processor.tokenizer, folder)
    _name_as_published(folder / "model.safetensors")
    processor.save_pretrained(folder)
    return count


def make_qwen_checkpoint(folder: Path, *, scale: Scale = _SMALL_QWEN) -> int:
    """Writes a Qwen2.5-VL, by default with a language half of the same size. A large square picture has 1,225
    tokens."""
    save_processor("qwen2_5_vl", "byte_level", folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 56 * 56, "longest_edge": _QWEN_MAX_PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"] |= scale.text
    del settings["text_config"]["layer_types"]
    settings["text_config"]["rope_parameters"]["mrope_section"] = list(scale.mrope_section)
    settings["vision_config"] |= scale.vision
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    return _save(_drawn(Qwen2_5_VLForConditionalGeneration, config, scale), tokenizer, folder)


def make_large_checkpoint(model: str, folder: Path, device: torch.device, *, tiny: bool) -> None:
    """Writes the checkpoint of `model`, one of LANGUAGE_LAYERS. `tiny`: a small model of the same family instead."""
    if tiny:
        (make_checkpoint if model == "llava" else make_qwen_checkpoint)(folder)
        return
    layers = {"num_hidden_layers": LANGUAGE_LAYERS[model]["language"]}
    place: dict[str, Any] = {"device": str(device), "dtype": dtype_of(device)}
    if model == "llava":
        make_checkpoint(folder, image_size=_CLIP_SIDE, scale=Scale(_LLAVA_TEXT | layers, _CLIP_L, **place))
    else:
        scale = Scale(_QWEN_7B_TEXT | layers, _QWEN_7B_VISION, _HALF_OF_A_HEAD, **place)
        make_qwen_checkpoint(folder, scale=scale)


def _drawn(model_class: type[PreTrainedModel], config: PreTrainedConfig, scale: Scale) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = model_class._from_config(config, dtype=scale.dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed_tokens" in parameter_name else 0.05)
    return model


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """Writes the weights with an output head that only gives visible text. Returns the language half's number of
    parameters."""
    with torch.no_grad():
        model.lm_head.weight[~_is_visible(tokenizer, model.lm_head.out_features)] = 0.0
    model.save_pretrained(folder)
    parts = (model.model.language_model, model.lm_head)
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def _is_visible(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> torch.Tensor:
    """Returns which single tokens are visible text, (vocab_size,), bool. The end of the vocabulary has no text."""
    texts = [tokenizer.decode([token_id], skip_special_tokens=True) for token_id in range(len(tokenizer))]
    visible = [text.strip().isascii() and text.strip().isprintable() and bool(text.strip()) for text in texts]
    return torch.tensor(visible + [False] * (vocab_size - len(visible)))


def _name_as_published(path: Path) -> None:
    """Renames the vision tower's weights as in published checkpoints, the only names that vLLM knows."""
    weights = load_file(path)
    inside, published = "vision_tower.", "vision_tower.vision_model."
    save_file({name.replace(inside, published): weight for name, weight in weights.items()}, path, {"format": "pt"})
