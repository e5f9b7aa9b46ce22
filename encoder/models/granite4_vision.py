"""Granite 4 Vision: a picture's features enter at several layers of the decoder, and none before the first layer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily
from raylens.encoder.models.found import find_vision_family
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Returns zeros for the placeholders' own embeddings, and a level for each layer behind them."""
    rows = []
    for item in items:
        features = dict(model.model.get_image_features(**item).deepstack_features)
        levels = [torch.cat(list(level)) for level in features.values()]
        rows.append(torch.cat([torch.zeros_like(levels[0]), *levels], dim=-1))
    return rows


def granite4_vision(config: PreTrainedConfig) -> VisionFamily:
    family = find_vision_family(config)
    return replace(family, modalities={"image": replace(family.modalities["image"], encode=_encode)})
