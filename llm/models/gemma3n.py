"""Gemma 3n: every layer has an embedding of its own for each token; the last layers see what earlier ones keep."""

from typing import Any

import torch
from transformers import PreTrainedModel

from llm.models.family import LanguageFamily, capped_output_head


def _embed_tokens(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Tokens behind the text's own, such as the one that ends a picture, are looked up in tables of their own."""
    inner: Any = model.model
    embeds: torch.Tensor = inner.get_input_embeddings()(token_ids)
    is_vision = (token_ids >= inner.embed_vision.vocab_offset) & (token_ids < inner.embed_audio.vocab_offset)
    is_audio = token_ids >= inner.embed_audio.vocab_offset
    for table, is_own in ((inner.embed_vision, is_vision), (inner.embed_audio, is_audio)):
        # Every token is looked up, without a glance at where they are: the host would wait for the device.
        own = table(input_ids=token_ids.where(is_own, table.vocab_offset))
        embeds = own.to(embeds.dtype).where(is_own.unsqueeze(-1), embeds)
    return embeds


def _per_layer_inputs(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """(1, num_tokens, num_layers, hidden_size_per_layer_input). Placeholders are none of the table's tokens, which
    transformers, too, takes for token 0."""
    return {"per_layer_inputs": model.model.language_model.get_per_layer_inputs(token_ids.unsqueeze(0))}


GEMMA3N = LanguageFamily(
    whole="Gemma3nForConditionalGeneration",
    unused=(
        "model.vision_tower",
        "model.embed_vision.soft_embedding_norm",
        "model.audio_tower",
        "model.embed_audio.soft_embedding_norm",
    ),
    embed_tokens=_embed_tokens,
    inputs_of_tokens=_per_layer_inputs,
    logits=capped_output_head,
)
