"""Runs the language half over the chunks of one step."""

from itertools import takewhile

import torch

from llm.attention import AttentionMetadata, KVCache, PrefillChunk
from llm.config import EngineConfig
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
        self._decoder = self._family.decoder(self._model)
        text_config = self._model.config.get_text_config()
        self.max_position_embeddings: int = text_config.max_position_embeddings
        self.embedding_size: int = text_config.hidden_size
        self.vocab_size: int = text_config.vocab_size
        layout = {
            "num_layers": text_config.num_hidden_layers,
            "block_size": config.block_size,
            "num_kv_heads": text_config.num_key_value_heads,
            "head_dim": getattr(text_config, "head_dim", None)
            or text_config.hidden_size // text_config.num_attention_heads,
        }
        self.num_blocks = config.kv_cache_bytes // KVCache.block_bytes(**layout, dtype=config.dtype)
        if self.num_blocks == 0:
            raise ValueError(f"kv_cache_bytes ({config.kv_cache_bytes}) does not hold a single block")
        self._kv_cache = KVCache(**layout, num_blocks=self.num_blocks, dtype=config.dtype, device=self._device)

    def prompt_layout(self, prompt: ProcessedPrompt) -> PromptLayout:
        return self._family.layout(self._model.config, prompt)

    @torch.inference_mode()
    def run(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """Computes the chunks (decode chunks first) and returns float32 logits, (number that sample, vocab)."""
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        hidden = self._decoder(
            inputs_embeds=self._embed(chunks).unsqueeze(0),
            position_ids=positions.unsqueeze(0).to(self._device),
            use_cache=False,
            attention_metadata=self._attention_metadata(chunks, positions),
        ).last_hidden_state[0]
        last_rows = torch.tensor([chunk.num_tokens for chunk in chunks]).cumsum(0) - 1
        sampling_rows = last_rows[torch.tensor([chunk.samples for chunk in chunks])]
        head = self._model.get_output_embeddings()
        logits: torch.Tensor = head(hidden[sampling_rows.to(self._device)])
        return logits.float()

    def _embed(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """Token embeddings of all chunks, (num_tokens, hidden_size), with item embeddings at their placeholders."""
        token_ids: list[int] = []
        overlays: list[tuple[list[int], torch.Tensor]] = []
        for chunk in chunks:
            row_of_start = len(token_ids)
            chunk_ids = chunk.sequence.token_ids[chunk.start : chunk.end]
            for item in chunk.sequence.items:
                positions, embeddings = item.between(chunk.start, chunk.end)
                for position in positions:
                    # A placeholder's id may lie outside the vocabulary; its embedding is not used.
                    chunk_ids[position - chunk.start] = 0
                overlays.append(([row_of_start + position - chunk.start for position in positions], embeddings))
            token_ids += chunk_ids
        embeds: torch.Tensor = self._model.get_input_embeddings()(torch.tensor(token_ids, device=self._device))
        for rows, embeddings in overlays:
            if rows:
                embeds[rows] = embeddings.to(embeds)
        return embeds

    def _attention_metadata(self, chunks: list[ScheduledChunk], positions: torch.Tensor) -> AttentionMetadata:
        tables = [torch.tensor(chunk.sequence.block_table) for chunk in chunks]
        sizes = [chunk.num_tokens for chunk in chunks]
        block_ids = torch.cat(
            [table[own // self._block_size] for table, own in zip(tables, torch.split(positions, sizes), strict=True)]
        )
        slots = block_ids * self._block_size + positions % self._block_size
        # The one-token chunks in front are batched; one that ends a prompt behind a longer chunk is a prefill.
        num_decodes = sum(1 for _ in takewhile(lambda chunk: chunk.num_tokens == 1, chunks))
        decode_tables, decode_mask = self._decode_tables(chunks[:num_decodes], tables[:num_decodes])
        prefills, row = [], num_decodes
        for chunk, table in zip(chunks[num_decodes:], tables[num_decodes:], strict=True):
            # Made here, once for all layers: each position sees every one up to itself.
            mask = torch.ones(chunk.num_tokens, chunk.end, dtype=torch.bool, device=self._device).tril(chunk.start)
            prefills.append(PrefillChunk(row, chunk.num_tokens, chunk.end, table.to(self._device), mask))
            row += chunk.num_tokens
        return AttentionMetadata(self._kv_cache, slots.to(self._device), decode_tables, decode_mask, prefills)

    def _decode_tables(
        self, chunks: list[ScheduledChunk], tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not chunks:
            return torch.empty(0, 0, dtype=torch.long), torch.empty(0)
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        lengths = torch.tensor([chunk.end for chunk in chunks])
        mask = torch.arange(padded.shape[1] * self._block_size) < lengths[:, None]
        return padded.to(self._device), mask[:, None, None, :].to(self._device)
