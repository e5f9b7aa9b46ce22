"""Loads the vision half of a checkpoint and nothing else."""

import torch
from transformers import AutoConfig, PreTrainedModel

from encoder.config import EncoderConfig
from encoder.models.family import VisionFamily
from encoder.packed_attention import use_packed_attention
from encoder.parts import place_parts
from modeling.families import load_family
from modeling.half_model import load_half


def load_vision_half(config: EncoderConfig) -> tuple[PreTrainedModel, VisionFamily]:
    """Returns the vision half, its tower and projector as the settings have them, in evaluation mode, and its family.

    Raises ValueError for an unsupported family and for a checkpoint that lacks a weight.
    """
    hf_config = AutoConfig.from_pretrained(config.model, revision=config.revision)
    family: VisionFamily = load_family("encoder", hf_config.model_type)
    model = load_half(
        family.model_class,
        config.model,
        half="vision",
        config=hf_config,
        revision=config.revision,
        # So that neither part's weights are rounded on the way.
        dtype=torch.promote_types(config.tower.dtype, config.projector.dtype),
    )
    if family.is_packed:
        use_packed_attention(model.get_submodule(family.tower))
    place_parts(model, family, config.tower, config.projector)
    return model, family
