"""Loads the language half of a checkpoint and nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raylens.llm.attention import ATTENTION_NAME, register_paged_attention
from raylens.llm.config import EngineConfig
from raylens.llm.layer_probe import reads_earlier_cache
from raylens.llm.layer_types import (
    HYBRID,
    INDEXED,
    REFERENCE,
    STATE,
    SUPPORTED,
    has_layers,
    layer_types,
    num_attention_layers,
)
from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.found import with_plain_head
from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.ranks.sharded_loading import sharded_class
from raylens.llm.rotary_forms import read_forms, why_form_unsupported
from raylens.modeling.context_length import check_context_length
from raylens.modeling.families import family_of, is_found, known_to, load_family
from raylens.modeling.half_model import load_half
from raylens.modeling.model_configs import load_model_config
from raylens.modeling.packed_linear import has_kernel_layers
from raylens.modeling.stored_weights import convert_weights


def load_language_half(
    config: EngineConfig,
    group: ProcessGroup | None = None,
    pack: Callable[[PreTrainedModel, LanguageFamily], None] = lambda model, family: None,
) -> tuple[PreTrainedModel, LanguageFamily]:
    """Returns the language half, on its device, in evaluation mode and with paged attention, and its family. With a
    `group` it holds only this rank's part of the weights. On the CPU, `pack` may replace layers, whose weights are as
    stored at this time; other weights then get the dtype of `computing_dtype`.

    Raises ValueError for an unsupported family or text model, for a `max_model_len` above the model's own, for a
    checkpoint that lacks a weight, and for a model that cannot be divided among the ranks."""
    hf_config = load_model_config(config.model, config.revision)
    text_config = hf_config.get_text_config()
    not_supported = f"the text model of {config.model} ({text_config.model_type}) is not supported"
    if reason := why_unsupported(text_config, has_encoder=_has_encoder(hf_config.model_type)):
        raise ValueError(f"{not_supported}: {reason}")
    if group is not None and has_layers(text_config, STATE | HYBRID):
        raise ValueError(f"{not_supported} on several ranks: its layers with a recurrent state are not divided")
    if group is not None and has_layers(text_config, INDEXED | REFERENCE):
        raise ValueError(f"{not_supported} on several ranks: its layers that choose positions are not divided")
    family = load_language_family(hf_config)
    if group is not None and family.cross is not None:
        raise ValueError(f"{not_supported} on several ranks: its cross attention is not divided")
    check_context_length(text_config, config.max_model_len, allow_longer=config.allow_longer_context)
    register_paged_attention()
    model_class = family.model_class if group is None else sharded_class(family.model_class, family.find_decoder, group)
    dtype = computing_dtype(config)
    try:
        model = load_half(
            model_class,
            config.model,
            half="language",
            renamings=family.renamings,
            config=hf_config,
            revision=config.revision,
            keeps_forms=config.device == "cpu" and group is None,
            maps_files=group is None,
            dtype=dtype,
            attn_implementation=_paged_in(hf_config, text_config),
        )
    except KeyError as error:
        # Some classes look up attention layers in a table of their own, not in transformers' registry.
        has_own_table = error.args == (ATTENTION_NAME,)
        reason = "its attention layers cannot be replaced" if has_own_table else f"its configuration lacks {error}"
        raise ValueError(f"{not_supported}: {reason}") from error
    if config.device == "cpu":
        pack(model, family)
        dtypes = dict.fromkeys((getattr(torch, config.dtype), dtype))
        for one in dtypes if group is None or len(dtypes) > 1 else ():  # the weights may have to be rounded first
            convert_weights(model, config.device, one)
    _share_caches(family.find_decoder(model))
    read_forms(family.find_decoder(model))
    if group is None:  # ranks are not in step yet
        family = with_plain_head(family, model)
    return model.to(config.device).requires_grad_(False), family


def computing_dtype(config: EngineConfig) -> torch.dtype:
    """Returns the dtype of hidden states: `config.dtype`, or float32 with Raylens' kernels, whatever their weights'."""
    if config.device == "cpu" and has_kernel_layers(torch.float32):
        return torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _paged_in(config: PreTrainedConfig, text_config: PreTrainedConfig) -> Any:
    """Returns transformers' choice of attention that gives `text_config`, inside `config` or the same, ours."""
    if config is text_config:
        return ATTENTION_NAME
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    name = next(name for name, one in inner.items() if one is not None and one.get_text_config() is text_config)
    return {name: _paged_in(inner[name], text_config)}


def load_language_family(hf_config: PreTrainedConfig) -> LanguageFamily:
    """Returns the declared or found family, or a default one for a causal language model of transformers. A vision
    plug-in computes the latter's item embeddings. Raises ValueError for other types."""
    model_type = hf_config.model_type
    is_known = model_type in known_to("llm") or is_found(model_type)
    if not is_known and (text_class := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)):
        return LanguageFamily(whole=text_class, unused=(), decoder="model")
    family: LanguageFamily = family_of("llm", hf_config)
    return family


def _share_caches(decoder: nn.Module) -> None:
    """Points each layer that reuses an earlier layer's keys and values to that layer's cache."""
    config: Any = decoder.config
    modes = getattr(config, "kv_sharing_modes", ())
    kept = {config.layer_types[index]: index for index, mode in enumerate(modes) if mode == "store"}
    for module in decoder.modules():
        if reads_earlier_cache(module):
            attention: Any = module
            attention.layer_idx = kept[attention.layer_type]


def _has_encoder(model_type: str) -> bool:
    """Returns whether a declared family gives prompts to a text encoder."""
    declared = load_family("llm", model_type) if model_type in known_to("llm") else None
    return isinstance(declared, LanguageFamily) and declared.cross is not None and declared.cross.encoder is not None


def why_unsupported(text_config: PreTrainedConfig, *, has_encoder: bool = False) -> str | None:
    """Returns the reason in the configuration for refusing the text model, or None. `probe_layers` finds others.
    `has_encoder`: whether the family declares the text encoder."""
    if text_config.is_encoder_decoder and not has_encoder:
        return "it is an encoder-decoder"
    if other := set(layer_types(text_config)) - SUPPORTED:
        return f"it has layers of type {sorted(other)}"
    if num_attention_layers(text_config) == 0:
        return "no layer has a KV cache"
    return why_form_unsupported(text_config)
