"""The vision half of a model that no family declares: each picture goes through the model's `get_image_features`
alone, and each sound through its `get_audio_features`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_frames
from raylens.modeling.found_model import find_model
from raylens.preprocess.schema import ItemTensors

_PATCH = 14
"""The side in pixels of a patch by which items are counted, if the configuration has none."""


def find_vision_family(config: PreTrainedConfig) -> VisionFamily:
    """Raises ValueError if transformers has no such model, or if it has no separate features of pictures or sounds."""
    found = find_model(config)
    modalities = {}
    if not found.only_hears:
        modalities["image"] = VisionModality(
            encode=partial(_encode, found.features_path, found.picture_fields),
            num_patches=_num_patches,
            batch_key=all_together,
        )
    if found.sounds is not None:
        modalities["audio"] = VisionModality(
            encode=partial(_encode_sounds, found.sounds, found.sound_fields, found.num_deepstack_levels),
            num_patches=count_frames,
            batch_key=all_together,
        )
    # The whole half is one part: which of its modules project is not known.
    return VisionFamily(
        whole=found.whole,
        unused=found.unused_by_vision,
        tower="",
        projector=(),
        modalities=modalities,
    )


def _encode(
    path: str, taken: Sequence[str], model: PreTrainedModel, items: Sequence[ItemTensors]
) -> list[torch.Tensor]:
    """Calls `get_image_features` once for each item. `taken`: the fields that it takes."""
    owner: Any = model.get_submodule(path)
    return [
        _rows(owner.get_image_features(**{name: value for name, value in item.items() if name in taken}))
        for item in items
    ]


def _encode_sounds(
    path: str, taken: Sequence[str], num_levels: int, model: PreTrainedModel, items: Sequence[ItemTensors]
) -> list[torch.Tensor]:
    """Calls `get_audio_features` once for each item. Its rows have zeros in place of a picture's deepstack levels."""
    owner: Any = model.get_submodule(path)
    encoded = []
    for item in items:
        outputs = owner.get_audio_features(**{name: value for name, value in item.items() if name in taken})
        rows, mask = _rows(outputs), getattr(outputs, "attention_mask", None)
        rows = rows if mask is None else rows[mask.flatten().bool()]  # some classes cut padding off in their forward
        encoded.append(torch.nn.functional.pad(rows, (0, num_levels * rows.shape[-1])))
    return encoded


def _rows(outputs: Any) -> torch.Tensor:
    """Returns a picture's features (num_embeds, size), with its deepstack levels behind them on the last axis."""
    features = outputs.last_hidden_state if outputs.pooler_output is None else outputs.pooler_output
    levels = [features, *(getattr(outputs, "deepstack_features", None) or ())]
    return torch.cat([_joined(level) for level in levels], dim=-1)


def _joined(level: Any) -> torch.Tensor:
    """Joins the parts of a picture, such as tiles, which models return as a tensor or one by one."""
    parts = [level] if isinstance(level, torch.Tensor) else level
    return torch.cat([part.flatten(0, -2) for part in parts])


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of patches that the item's pixels fill, of three colours each."""
    vision_config = getattr(config, "vision_config", None)
    patch = getattr(vision_config, "patch_size", None)
    side = patch if isinstance(patch, int) else _PATCH
    num_values = sum(tensor.numel() for tensor in item.values() if tensor.is_floating_point())
    return max(1, num_values // (3 * side**2))
