"""Gemma 3n: every layer has its own embedding of each token, and the last layers attend over earlier layers' caches."""

from typing import Any

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, capped_output_head


def _embed_tokens(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the embeddings of tokens. Tokens beyond the text vocabulary, such as the end of a picture, are in
    separate tables for vision and audio."""
    inner: Any = model.model
    embeds: torch.Tensor = inner.get_input_embeddings()(token_ids)
    is_vision = (token_ids >= inner.embed_vision.vocab_offset) & (token_ids < inner.embed_audio.vocab_offset)
    is_audio = token_ids >= inner.embed_audio.vocab_offset
    for table, is_own in ((inner.embed_vision, is_vision), (inner.embed_audio, is_audio)):
        # All tokens are looked up in both tables, because selecting a table's own tokens would synchronize.
        own = table(input_ids=token_ids.where(is_own, table.vocab_offset))
        embeds = own.to(embeds.dtype).where(is_own.unsqueeze(-1), embeds)
    return embeds


def _per_layer_inputs(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns every layer's embeddings of the tokens, (1, num_tokens, num_layers, hidden_size_per_layer_input).
    Placeholders have the id 0 here. transformers, too, looks up token 0 for ids outside the table."""
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
