"""LongRoPE: rotary embeddings of a short form up to a number of tokens, and of a long form for longer sequences.

transformers decides by the longest sequence of a forward. Here each sequence decides by its own tokens, and a rotary
position tells its form: positions of the long form are `LONG_FORM` higher. A sequence that outgrows the short form is
computed again in the long one, as `generate` does."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from raylens.llm.prompt_layout import PromptLayout

LONG_FORM = 2**24
"""More than the positions of any context."""
_RECOMPUTING = frozenset({"phi3", "phi4_multimodal"})
"""Text models whose `generate` computes all keys again in the long form."""


def why_form_unsupported(text_config: PreTrainedConfig) -> str | None:
    """Returns the reason for refusing a text model with rotary embeddings of two forms, or None."""
    ropes: Any = getattr(text_config, "rope_parameters", None) or {}
    types = {one.get("rope_type") for one in (ropes, *ropes.values()) if isinstance(one, dict)}
    if "longrope" not in types or text_config.model_type in _RECOMPUTING:
        return None
    return "it has rotary embeddings of type 'longrope', and keeps keys of the short form beside those of the long one"


def in_its_form(layout: PromptLayout, num_prompt_tokens: int, text_config: PreTrainedConfig) -> PromptLayout:
    """Returns the layout of a prompt, with the form for its length."""
    ropes: Any = getattr(text_config, "rope_parameters", None) or {}
    if ropes.get("rope_type") != "longrope":
        return layout
    longest: int = ropes["original_max_position_embeddings"]
    long = replace(layout, rope_offsets=(LONG_FORM,), cache_name=b"long form")
    return long if num_prompt_tokens > longest else replace(layout, longest=longest, beyond=long)


def read_forms(decoder: nn.Module) -> None:
    """Makes rotary embeddings of two forms read each token's form from its position."""
    for module in decoder.modules():
        if getattr(module, "rope_type", None) == "longrope":
            config: Any = module.config
            beyond = config.rope_parameters["original_max_position_embeddings"] + 1
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=beyond)
            module.register_buffer("long_inv_freq", frequencies, persistent=False)
            module.forward = partial(_forward, module)


def _forward(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines, (1, num_tokens, dim), for positions (1, num_tokens)."""
    is_long = position_ids >= LONG_FORM
    frequencies = torch.where(is_long[..., None], module.long_inv_freq, module.original_inv_freq)
    angles = (position_ids - LONG_FORM * is_long)[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cosines, sines = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cosines.to(x.dtype), sines.to(x.dtype)
