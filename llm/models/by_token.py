"""Families that are found but for inputs of the decoder that depend on the token ids."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.models.family import LanguageFamily, capped_output_head, output_head
from raylens.llm.models.found import find_language_family
from raylens.llm.models.spans import layout_of_runs


def _per_layer_inputs(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns every layer's embeddings of the tokens, (1, num_tokens, num_layers, hidden_size_per_layer_input).
    Placeholders have those of padding."""
    decoder: Any = model.get_submodule("model.language_model")
    config: Any = model.config
    placeholders = [one for one in (config.image_token_id, config.audio_token_id) if one is not None]
    is_placeholder = torch.isin(token_ids, token_ids.new_tensor(placeholders))
    ids = token_ids.masked_fill(is_placeholder, config.get_text_config().pad_token_id)
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids.unsqueeze(0), None)}


def gemma4(config: PreTrainedConfig) -> LanguageFamily:
    """Pictures of the large models are spans in layers with a window."""
    family = replace(find_language_family(config), logits=capped_output_head)
    if config.get_text_config().use_bidirectional_attention == "vision":
        family = replace(family, layout=layout_of_runs, has_spans=True, spans_need_window=True)
    has_inputs = getattr(config.get_text_config(), "hidden_size_per_layer_input", None)
    return replace(family, inputs_of_tokens=_per_layer_inputs, keeps_placeholders=True) if has_inputs else family


def _token_types(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns 1 for tokens that the experts for pictures compute: placeholders and the marks around a picture."""
    config: Any = model.config
    of_pictures = (config.image_token_id, config.image_start_token_id, config.image_end_token_id)
    types = sum((token_ids == one).int() for one in of_pictures)
    return {"moe_mm_token_type_ids": types.unsqueeze(0)}


def ernie4_5_vl_moe(config: PreTrainedConfig) -> LanguageFamily:
    return replace(find_language_family(config), inputs_of_tokens=_token_types, keeps_placeholders=True)


def _ids_of_ngrams(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"ple_input_ids": token_ids.unsqueeze(0)}


def qwen4_exp(config: PreTrainedConfig) -> LanguageFamily:
    # The `logits` of a found family call the class's forward, which would look for tokens with the given embeddings.
    family = replace(find_language_family(config), logits=output_head)
    has_ngrams = getattr(config.get_text_config(), "ple_layer_ids", None)
    return replace(family, inputs_of_tokens=_ids_of_ngrams, keeps_placeholders=True) if has_ngrams else family
