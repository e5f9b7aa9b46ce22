"""Tiles of one size attend by Raylens' kernels; what those do not know goes to PyTorch."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from raylens.cpu_kernels.attention import attend_pictures
from raylens.encoder import tile_attention as module
from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.loader import load_vision_half
from raylens.encoder.tile_attention import tile_attention
from raylens.modeling.families import FAMILIES
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemTensors
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.small_models import make_checkpoint
from tests.sounds import noise, recorded

NUM_TILES, NUM_HEADS, NUM_PATCHES, HEAD_DIM = 3, 2, 37, 12


def tiles(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values, laid out as the towers have them."""
    whole = torch.randn(3, NUM_TILES, NUM_PATCHES, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    return [part.transpose(1, 2).to(dtype) for part in whole]


MASK = torch.zeros(NUM_TILES, 1, NUM_PATCHES, NUM_PATCHES).index_fill(3, torch.tensor([5, 7]), -torch.inf)


@pytest.mark.parametrize(
    ("options", "dtype", "is_for_kernels"),
    [
        ({"is_causal": False}, torch.float32, True),
        ({"is_causal": False, "scaling": 0.3}, torch.float32, True),
        ({"is_causal": False, "attention_mask": MASK}, torch.float32, False),
        ({"is_causal": True}, torch.float32, False),
        ({"is_causal": False}, torch.bfloat16, False),
    ],
)
def test_tiles_attend_as_pytorch_does_it(
    options: dict[str, Any], dtype: torch.dtype, is_for_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Mock(wraps=attend_pictures)
    monkeypatch.setattr(module, "attend_pictures", kernels)
    options = {"attention_mask": None, **options}
    output, _ = tile_attention(nn.Module(), *tiles(dtype), **options)
    expected, _ = sdpa_attention_forward(nn.Module(), *tiles(dtype), **options)
    torch.testing.assert_close(output, expected)
    assert kernels.call_count == is_for_kernels


@pytest.mark.parametrize(("linear", "num_calls"), [("packed", 2), ("plain", 0)])
def test_a_packed_tower_attends_by_kernels(
    linear: Any, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Mock(wraps=attend_pictures)
    monkeypatch.setattr(module, "attend_pictures", kernels)
    part = PartConfig(linear=linear)
    half, _ = load_vision_half(EncoderConfig(make_checkpoint("llava", tmp_path), tower=part, projector=part))
    pixels = torch.zeros(1, 3, half.config.vision_config.image_size, half.config.vision_config.image_size)
    half.model.vision_tower(pixels)
    assert kernels.call_count == num_calls == (half.config.vision_config.num_hidden_layers if num_calls else 0)


# Gemma 3n's other tower needs timm, which the short tests do without.
HEARING = (
    pytest.param("gemma3n", marks=pytest.mark.long),
    "gemma4",
    "nemotron_h_omni",
    "qwen2_audio",
    "qwen3_omni_moe_thinker",
)


@pytest.mark.parametrize("model_type", HEARING)
def test_sounds_of_a_packed_tower_are_those_of_a_plain_one(model_type: str, tmp_path: Path) -> None:
    """Gemma 4's tower of sounds has attention of its own, and masks that only this one takes."""
    (make_checkpoint if model_type in FAMILIES else save_small_checkpoint)(model_type, tmp_path)
    items = MultiModalProcessor(ProcessorConfig(str(tmp_path))).items
    _, item = items.process("audio", recorded(noise(1.0)))
    plain, packed = (encoded_by(PartConfig(linear=linear), tmp_path, item) for linear in ("plain", "packed"))
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)


def encoded_by(part: PartConfig, checkpoint: Path, item: ItemTensors) -> torch.Tensor:
    half, family = load_vision_half(EncoderConfig(str(checkpoint), tower=part, projector=part))
    with torch.inference_mode():
        (rows,) = family.modalities["audio"].encode(half, [item])
    return rows
