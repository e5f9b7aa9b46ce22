"""Qwen2-Audio: a tower of Whisper's form, for sounds that are padded to 30 seconds. transformers' class has no method
for these features: its forward computes them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_frames
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    return [_encode_one(model.base_model, item["input_features"], item["feature_attention_mask"]) for item in items]


def _encode_one(inner: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`features`: (1, num_mel_bins, num_frames). `mask`: (1, num_frames), 1 for frames of the sound."""
    length, num_rows = inner.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
    positions = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
    attention_mask = create_bidirectional_mask(
        config=inner.audio_tower.config,
        inputs_embeds=features.new_zeros(1, len(positions), 1),
        attention_mask=(positions < length).long().unsqueeze(0),
    )
    hidden = inner.audio_tower(features, attention_mask=attention_mask).last_hidden_state
    rows: torch.Tensor = inner.multi_modal_projector(hidden)[0, : int(num_rows)]
    return rows


QWEN2_AUDIO = VisionFamily(
    whole="Qwen2AudioForConditionalGeneration",
    tower="model.audio_tower",
    modalities={"audio": VisionModality(encode=_encode, num_patches=count_frames, batch_key=all_together)},
)
