"""Loads the vision half of a checkpoint and nothing else."""

import torch
from transformers import AutoConfig, PreTrainedModel

from encoder.models import FAMILIES, VisionFamily


def load_vision_half(
    model: str, *, revision: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, VisionFamily]:
    """Returns the vision half on `device` in `dtype`, in evaluation mode, and its family.

    Raises ValueError for an unsupported family and for a checkpoint that lacks a weight: transformers would
    leave that weight random and only warn.
    """
    config = AutoConfig.from_pretrained(model, revision=revision)
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} of {model} is not supported, only {sorted(FAMILIES)}")
    family = FAMILIES[config.model_type]
    half, loading = family.model_class.from_pretrained(
        model, config=config, revision=revision, dtype=dtype, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise ValueError(f"{model} lacks weights of the vision half: {sorted(loading['missing_keys'])[:5]}")
    return half.to(device).eval(), family
