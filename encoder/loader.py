"""Loads the vision half of a checkpoint and nothing else."""

import torch
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.models.family import VisionFamily
from raylens.encoder.packed_attention import use_packed_attention
from raylens.encoder.parts import place_parts
from raylens.encoder.tile_attention import use_tile_attention
from raylens.modeling.families import family_of
from raylens.modeling.half_model import load_half
from raylens.modeling.model_configs import load_model_config
from raylens.modeling.packed_linear import has_kernel_layers


def load_vision_half(config: EncoderConfig) -> tuple[PreTrainedModel, VisionFamily]:
    """Returns the vision half in evaluation mode, and its family. The settings decide the devices, dtypes and linear
    layers of tower and projector.

    Raises ValueError for an unsupported family and for a checkpoint that lacks a weight."""
    hf_config = load_model_config(config.model, config.revision)
    family: VisionFamily = family_of("encoder", hf_config)
    model = load_half(
        family.model_class,
        config.model,
        half="vision",
        renamings=family.renamings,
        config=hf_config,
        revision=config.revision,
        keeps_forms=True,
        # The wider of both parts' dtypes, so that loading does not round weights.
        dtype=torch.promote_types(config.tower.dtype, config.projector.dtype),
    )
    tower = model.get_submodule(family.tower)
    has_kernels = config.tower.linear == "packed" and has_kernel_layers(config.tower.dtype)
    if family.is_packed:
        use_packed_attention(tower, with_kernels=has_kernels)
    elif has_kernels and isinstance(tower, PreTrainedModel):
        use_tile_attention(tower)
    place_parts(model, family, config.tower, config.projector)
    return model, family
