"""The language half's forward pass over the tokens of one step: embeddings in, hidden states and logits out."""

from typing import Any

import torch
from transformers import PreTrainedModel

from raylens.llm.attention import AttentionBackend
from raylens.llm.cpu.fused_decoder import FusedDecoder
from raylens.llm.cpu.kernel_attention import KernelStep
from raylens.llm.decoder_parts import DecoderParts
from raylens.llm.lora.layers import LoraLayers
from raylens.llm.models.family import LanguageFamily
from raylens.llm.sampling.logprobs import TokenLogprobs, token_logprobs
from raylens.llm.step_input import StepInput

# Prompt logits are computed for so many tokens at a time, because the vocabulary is large.
_SCORED_AT_ONCE = 128


class ForwardPass:
    """Runs a `model`'s `decoder` as its `family` declares. `lora_layers`: None without adapters. `embedding_size`: the
    last axis of item embeddings, hidden_size * (1 + deepstack levels)."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: LanguageFamily,
        decoder: torch.nn.Module,
        lora_layers: LoraLayers | None,
        parts: DecoderParts,
    ) -> None:
        self._parts = parts
        self._model = model
        self._family = family
        self._decoder = decoder
        self._lora_layers = lora_layers
        self._hidden_size: int = model.config.get_text_config().hidden_size
        self.embedding_size = self._hidden_size * (1 + family.num_deepstack_levels(model.config))
        self.fused: FusedDecoder | None = None
        """Runs the whole decoder in one call. None if the decoder is not plain."""

    def __call__(self, step: StepInput, attention: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model. Returns the hidden states, (num_tokens, hidden_size), and the logits of `step.logits_rows`,
        float32. Hidden states of rows without logits are undefined."""
        if step.row_slots is not None:
            assert self._lora_layers is not None
            with self._lora_layers.of(step.row_slots):
                return self.run_layers(step, attention)
        if self.fused is not None and isinstance(attention, KernelStep):
            return self.run_fused(self.fused, step, attention, wants_all_hidden=step.reads_hidden)
        return self.run_layers(step, attention)

    def run_fused(
        self, fused: FusedDecoder, step: StepInput, attention: KernelStep, *, wants_all_hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step in one call of `fused`."""
        embeds = levels = None
        if len(step.embed_rows) or not fused.has_embedding:
            embeds, levels = self._embed(step)
        hidden, logits = fused.run(attention.chunks, step, embeds, levels, wants_all_hidden=wants_all_hidden)
        return hidden, self.logits(hidden[step.logits_rows]) if logits is None else logits

    def run_layers(self, step: StepInput, attention: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step by transformers' decoder, layer by layer."""
        with self._parts.of(step, attention) as (inputs, own_attention):
            hidden = self._decoder(
                **self._inputs(step),
                **inputs,
                position_ids=step.positions if self._family.num_rope_axes == 1 else step.positions.unsqueeze(1),
                use_cache=False,
                attention_metadata=own_attention,
            ).last_hidden_state[0]
        return hidden, self.logits(hidden[step.logits_rows])

    def inputs_of_tokens(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """Returns the inputs of the decoder beside embeddings and positions of tokens without items."""
        further = {} if self._parts.variant is None else self._parts.variant.inputs
        return {**self._family.inputs_of_tokens(self._model, token_ids), **further}

    def score(self, hidden: torch.Tensor, step: StepInput) -> list[TokenLogprobs]:
        """Returns the log-probabilities of the prompt tokens in `step.scored`. `hidden`: the step's hidden states."""
        scored: list[TokenLogprobs] = []
        for start in range(0, len(step.scored), _SCORED_AT_ONCE):
            rows, token_ids, num_top = zip(*step.scored[start : start + _SCORED_AT_ONCE], strict=True)
            scored += token_logprobs(self.logits(hidden[list(rows)]), token_ids, num_top)
        return scored

    def _inputs(self, step: StepInput) -> dict[str, Any]:
        """Returns the decoder's inputs: `inputs_embeds`, (1, num_tokens, hidden_size), with the items' embeddings at
        their placeholders, the item mask and deepstack levels, and the family's `inputs_of_tokens`."""
        embeds, levels = self._embed(step)
        inputs = {"inputs_embeds": embeds.unsqueeze(0), **self.inputs_of_tokens(step.token_ids)}
        if not len(step.embed_rows) or not (levels is not None or self._family.takes_item_mask):
            return inputs
        item_mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
        item_mask.index_fill_(1, step.embed_rows, True)  # an assignment would synchronize with the device
        if levels is None:
            return {**inputs, "item_mask": item_mask}
        split = torch.split(levels, self._hidden_size, dim=-1)
        return inputs | self._family.deepstack_inputs(item_mask, split)

    def _embed(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the embeddings of all tokens, (num_tokens, hidden_size), with those of items at their placeholders,
        and the deepstack levels, (num_embeds, levels * hidden_size), or None."""
        embeds = self._family.embed_tokens(self._model, step.token_ids)
        if not len(step.embed_rows):
            return embeds, None
        given = (step.embeds[0] if len(step.embeds) == 1 else torch.cat(step.embeds)).to(embeds)
        own, levels = given[:, : self._hidden_size], given[:, self._hidden_size :]
        embeds[step.embed_rows] = embeds[step.embed_rows] + own if self._family.adds_embeddings else own
        return embeds, levels if levels.shape[1] else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (num_tokens, vocab), float32, of hidden states, (num_tokens, hidden_size)."""
        return self._family.logits(self._model, hidden).float()
