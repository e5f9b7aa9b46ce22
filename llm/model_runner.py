"""Runs the language half over the chunks of one step."""

from itertools import takewhile
from typing import Any

import torch

from llm.attention import AttentionMetadata, KVCache, PrefillChunk
from llm.attention_masks import decode_mask, prefill_mask
from llm.config import EngineConfig
from llm.layer_probe import probe_layers
from llm.loader import load_language_half
from llm.prompt_layout import PromptLayout
from llm.scheduler import ScheduledChunk
from preprocess.schema import ProcessedPrompt


class ModelRunner:
    """Holds the weights and the KV cache; knows chunks of sequences, not requests."""

    def __init__(self, config: EngineConfig) -> None:
        self._device = torch.device(config.device)
        self._block_size = config.block_size
        self._model, self._family = load_language_half(config)
        self._decoder = self._family.find_decoder(self._model)
        text_config = self._model.config.get_text_config()
        self.max_position_embeddings: int = text_config.max_position_embeddings
        self._hidden_size: int = text_config.hidden_size
        self._num_deepstack_levels = self._family.num_deepstack_levels(self._model.config)
        layers = probe_layers(self._decoder, hidden_size=self._hidden_size, num_layers=text_config.num_hidden_layers)
        self._windows = {layer.window for layer in layers}
        block_bytes = KVCache.block_bytes(layers, block_size=config.block_size, dtype=config.dtype)
        self.num_blocks = config.kv_cache_bytes // block_bytes
        if self.num_blocks == 0:
            raise ValueError(f"kv_cache_bytes ({config.kv_cache_bytes}) does not hold a single block")
        self._kv_cache = KVCache(
            layers,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            device=self._device,
        )

    @property
    def embedding_size(self) -> int:
        """Size of the last axis of item embeddings: that of hidden states, for each deepstack level once more."""
        return self._hidden_size * (1 + self._num_deepstack_levels)

    def prompt_layout(self, prompt: ProcessedPrompt) -> PromptLayout:
        """How the prompt's positions relate; raises InvalidRequestError where its items do not fit it."""
        return self._family.layout(self._model, prompt)

    @torch.inference_mode()
    def run(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """Computes the chunks (decode chunks first) and returns float32 logits, (number that sample, vocab)."""
        hidden = self._decoder(
            **self._embed(chunks),
            position_ids=self._position_ids(chunks),
            use_cache=False,
            attention_metadata=self._attention_metadata(chunks),
        ).last_hidden_state[0]
        last_rows = torch.tensor([chunk.num_tokens for chunk in chunks]).cumsum(0) - 1
        sampling_rows = last_rows[torch.tensor([chunk.samples for chunk in chunks])]
        return self._family.logits(self._model, hidden[sampling_rows.to(self._device)]).float()

    def _position_ids(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """(1, num_tokens), for several rotary axes (num_axes, 1, num_tokens)."""
        num_axes = self._family.num_rope_axes
        positions = torch.cat(
            [chunk.sequence.layout.positions(chunk.start, chunk.end).expand(num_axes, -1) for chunk in chunks], dim=1
        ).to(self._device)
        return positions if num_axes == 1 else positions.unsqueeze(1)

    def _embed(self, chunks: list[ScheduledChunk]) -> dict[str, Any]:
        """The decoder's inputs: `inputs_embeds`, (1, num_tokens, hidden_size), with item embeddings at their
        placeholders, and the deepstack levels of the latter."""
        token_ids: list[int] = []
        rows: list[int] = []
        item_embeds: list[torch.Tensor] = []
        for chunk in chunks:
            row_of_start = len(token_ids)
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            for item in chunk.sequence.items:
                positions, embeddings = item.between(chunk.start, chunk.end)
                if positions:
                    rows += [row_of_start + position - chunk.start for position in positions]
                    item_embeds.append(embeddings)
        if not self._family.adds_embeddings:
            for row in rows:
                token_ids[row] = 0  # a placeholder's id may lie outside the vocabulary; its embedding is not used
        embeds: torch.Tensor = self._model.get_input_embeddings()(torch.tensor(token_ids, device=self._device))
        deepstack = self._overlay(embeds, rows, item_embeds) if rows else {}
        return {"inputs_embeds": embeds.unsqueeze(0), **deepstack}

    def _overlay(self, embeds: torch.Tensor, rows: list[int], item_embeds: list[torch.Tensor]) -> dict[str, Any]:
        """Puts the items' embeddings into the rows of `embeds` in place; returns what the decoder adds later."""
        row_ids, order = torch.tensor(rows, device=self._device).sort()
        features = torch.cat([embeddings.to(embeds) for embeddings in item_embeds])[order]
        own, *levels = torch.split(features, self._hidden_size, dim=-1)
        embeds[row_ids] = embeds[row_ids] + own if self._family.adds_embeddings else own
        if not levels:
            return {}
        is_visual = torch.zeros(1, len(embeds), dtype=torch.bool, device=self._device)
        is_visual[0, row_ids] = True
        return {"visual_pos_masks": is_visual, "deepstack_visual_embeds": levels}

    def _attention_metadata(self, chunks: list[ScheduledChunk]) -> AttentionMetadata:
        tables = [torch.tensor(chunk.sequence.block_table) for chunk in chunks]
        slots = torch.cat([self._slots(chunk, table) for chunk, table in zip(chunks, tables, strict=True)])
        # The one-token chunks in front are batched; one that ends a prompt behind a longer chunk is a prefill.
        num_decodes = sum(1 for _ in takewhile(lambda chunk: chunk.num_tokens == 1, chunks))
        decode_tables, decode_masks = self._decode_tables(chunks[:num_decodes], tables[:num_decodes])
        prefills, row = [], num_decodes
        for chunk, table in zip(chunks[num_decodes:], tables[num_decodes:], strict=True):
            masks = {window: self._prefill_mask(chunk, window) for window in self._windows}
            prefills.append(PrefillChunk(row, chunk.num_tokens, chunk.end, table.to(self._device), masks))
            row += chunk.num_tokens
        return AttentionMetadata(self._kv_cache, slots.to(self._device), decode_tables, decode_masks, prefills)

    def _slots(self, chunk: ScheduledChunk, table: torch.Tensor) -> torch.Tensor:
        indices = torch.arange(chunk.start, chunk.end)
        return table[indices // self._block_size] * self._block_size + indices % self._block_size

    def _prefill_mask(self, chunk: ScheduledChunk, window: int | None) -> torch.Tensor:
        return prefill_mask(
            chunk.start,
            chunk.end,
            chunk.sequence.layout.spans,
            window,
            windows_cut_spans=self._family.windows_cut_spans,
            device=self._device,
        )

    def _decode_tables(
        self, chunks: list[ScheduledChunk], tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[int | None, torch.Tensor]]:
        if not chunks:
            return torch.empty(0, 0, dtype=torch.long), {}
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(self._device)
        lengths = torch.tensor([chunk.end for chunk in chunks], device=self._device)
        num_slots = padded.shape[1] * self._block_size
        return padded, {window: decode_mask(lengths, num_slots, window) for window in self._windows}
