"""Gemma 3n: a convolutional tower for pictures of one size, and a tower for sounds. All sounds have the same number of
embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_frames
from raylens.encoder.models.tiles import IMAGE
from raylens.preprocess.schema import ItemTensors


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of positions in MobileNetV5's stage with the most layers, each of 16 x 16 pixels."""
    height, width = item["pixel_values"].shape[-2:]
    return -(-height // 16) * -(-width // 16)


def _encode_sounds(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes each sound alone. As in the whole model, copies of the last sound token's embedding follow its rows."""
    inner: Any = model.base_model
    last_token = torch.full((1, 1), inner.vocab_size - 1, device=items[0]["input_features"].device)
    filling = inner.embed_audio(input_ids=last_token)[0]
    encoded = []
    for item in items:
        outputs = inner.get_audio_features(item["input_features"], ~item["input_features_mask"])
        rows = outputs.pooler_output[0]
        rest = model.config.audio_soft_tokens_per_image - len(rows)
        encoded.append(torch.cat((rows, filling.expand(rest, -1))))
    return encoded


# The tower of pictures comes from timm, an optional dependency (`raylens[gemma3n]`).
GEMMA3N = VisionFamily(
    whole="Gemma3nForConditionalGeneration",
    # The language half embeds the prompt's own vision tokens, such as the end of a picture.
    unused=(
        *("model.language_model", "lm_head"),
        *("model.embed_vision.embedding", "model.embed_vision.hard_embedding_norm"),
    ),
    projector=("model.embed_vision", "model.embed_audio"),
    modalities={
        "image": replace(IMAGE, num_patches=_num_patches),
        "audio": VisionModality(encode=_encode_sounds, num_patches=count_frames, batch_key=all_together),
    },
    has_tiles=True,
)
