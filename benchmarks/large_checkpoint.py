"""Checkpoints as wide as those of 7B models, with fewer language layers, made on the device in seconds."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_limits import dtype_of
from benchmarks.random_checkpoint import Scale, make_checkpoint, make_qwen_checkpoint

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
_QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_HALF_OF_A_HEAD = (16, 24, 24)


def make_large_checkpoint(model: str, folder: Path, device: torch.device, *, tiny: bool) -> None:
    """Writes the checkpoint of `model`, one of LANGUAGE_LAYERS. `tiny`: a small model of the same family instead."""
    if tiny:
        (make_checkpoint if model == "llava" else make_qwen_checkpoint)(folder)
        return
    layers = {"num_hidden_layers": LANGUAGE_LAYERS[model]["language"]}
    dtype = dtype_of(device)
    if model == "llava":
        scale = Scale(_LLAVA_TEXT | layers, _CLIP_L, device=str(device), dtype=dtype)
        make_checkpoint(folder, image_size=_CLIP_SIDE, scale=scale)
    else:
        make_qwen_checkpoint(
            folder, scale=Scale(_QWEN_TEXT | layers, _QWEN_VISION, _HALF_OF_A_HEAD, str(device), dtype)
        )
