"""Families of a text encoder, which reads the prompt with its pictures, and a decoder that cross-attends to it."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import CrossFamily, LanguageFamily
from raylens.llm.states.cross_source import CrossSource, CrossView
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt


def _split(model: PreTrainedModel, prompt: ProcessedPrompt) -> tuple[ProcessedPrompt, CrossSource]:
    """Gives the whole prompt to the encoder. The decoder begins as `generate` lets it begin."""
    token_ids, num_tokens = prompt.prompt_token_ids, len(prompt.prompt_token_ids)
    most = model.config.get_text_config().max_position_embeddings
    if num_tokens > most:
        reason = f"the prompt has {num_tokens} tokens, the model's text encoder takes {most}"
        raise InvalidRequestError(reason, field="messages", code="context_length_exceeded")
    generation = model.generation_config
    assert generation is not None
    begin = [generation.decoder_start_token_id, generation.forced_bos_token_id]
    positions = [placeholder.embed_positions() for placeholder in prompt.placeholders]
    views = [CrossView(0, 0, num_tokens, is_own=True)]
    own = [token_id for token_id in begin if token_id is not None]
    source = CrossSource(num_tokens, token_ids, num_tokens, positions, views)
    return replace(prompt, prompt_token_ids=own, placeholders=[], is_continued=False), source


def _embed_tokens(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    embeds: torch.Tensor = model.model.language_model.decoder.embed_tokens(token_ids)
    return embeds


FLORENCE2 = LanguageFamily(
    whole="Florence2ForConditionalGeneration",
    decoder="model.language_model.decoder",
    embed_tokens=_embed_tokens,
    cross=CrossFamily(
        attention="encoder_attn",
        states="encoder_hidden_states",
        split=_split,
        encoder="model.language_model.encoder",
        positions="embed_positions",
    ),
)
