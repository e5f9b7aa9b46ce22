"""Granite 4 Vision: layers of the decoder that the configuration names add a picture's features to their input."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.found import find_language_family


def granite4_vision(config: PreTrainedConfig) -> LanguageFamily:
    of_layers = [*(layer for _, layer in config.deepstack_layer_map), *config.spatial_target_layers]
    layers = list(dict.fromkeys(of_layers))  # the last features for a layer replace earlier ones, in the first's place

    def inputs(item_mask: torch.Tensor, levels: Sequence[torch.Tensor]) -> dict[str, Any]:
        return {
            "vision_mask": item_mask.unsqueeze(-1),
            "deepstack_features": dict(zip(layers, levels, strict=True)),
        }

    return replace(
        find_language_family(config), num_deepstack_levels=lambda config: len(layers), deepstack_inputs=inputs
    )
