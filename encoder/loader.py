"""Loads the vision half of a checkpoint and nothing else."""

import torch
from transformers import AutoConfig, PreTrainedModel

from encoder.models import FAMILIES, VisionFamily
from modeling.half_model import load_half


def load_vision_half(
    model: str, *, revision: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, VisionFamily]:
    """Returns the vision half on `device` in `dtype`, in evaluation mode, and its family.

    Raises ValueError for an unsupported family and for a checkpoint that lacks a weight.
    """
    config = AutoConfig.from_pretrained(model, revision=revision)
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} of {model} is not supported, only {sorted(FAMILIES)}")
    family = FAMILIES[config.model_type]
    half = load_half(family.model_class, model, half="vision", config=config, revision=revision, dtype=dtype)
    return half.to(device), family
