"""Runs the language half over the chunks of one step."""

from itertools import takewhile

import torch

from llm.attention import AttentionMetadata, KVCache, PrefillChunk
from llm.config import EngineConfig
from llm.loader import load_language_half
from llm.lockstep import run_on_all_ranks
from llm.parallel import ProcessGroup
from llm.prompt_layout import PromptLayout
from llm.scheduler import ScheduledChunk
from llm.sharding import kv_heads_per_rank
from llm.step_input import StepInput
from preprocess.schema import ProcessedPrompt


class ModelRunner:
    """Holds the weights and the KV cache; knows chunks of sequences, not requests."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._device = torch.device(config.device)
        self._block_size = config.block_size
        self._model, self._family = load_language_half(config, group)
        self._decoder = self._family.decoder(self._model)
        text_config = self._model.config.get_text_config()
        self.max_position_embeddings: int = text_config.max_position_embeddings
        self.embedding_size: int = text_config.hidden_size
        layout = {
            "num_layers": text_config.num_hidden_layers,
            "block_size": config.block_size,
            "num_kv_heads": kv_heads_per_rank(text_config, group.world_size if group else 1),
            "head_dim": getattr(text_config, "head_dim", None)
            or text_config.hidden_size // text_config.num_attention_heads,
        }
        self.num_blocks = config.kv_cache_bytes // KVCache.block_bytes(**layout, dtype=config.dtype)
        if self.num_blocks == 0:
            raise ValueError(f"kv_cache_bytes ({config.kv_cache_bytes}) does not hold a single block")
        self._kv_cache = KVCache(**layout, num_blocks=self.num_blocks, dtype=config.dtype, device=self._device)

    def prompt_layout(self, prompt: ProcessedPrompt) -> PromptLayout:
        return self._family.layout(self._model.config, prompt)

    def run(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """Computes the chunks (decode chunks first) and returns float32 logits, (number that sample, vocab)."""
        step = self._step_input(chunks)
        return self.run_step(step) if self._group is None else run_on_all_ranks(self, self._group, step)

    @torch.inference_mode()
    def run_step(self, step: StepInput) -> torch.Tensor:
        """The part of `run` that every rank does."""
        embeds: torch.Tensor = self._model.get_input_embeddings()(step.token_ids.to(self._device))
        embeds[step.embed_rows.to(self._device)] = step.embeds.to(embeds)
        hidden = self._decoder(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0).to(self._device),
            use_cache=False,
            attention_metadata=self._attention_metadata(step),
        ).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        logits: torch.Tensor = head(hidden[step.sampling_rows.to(self._device)])
        return logits.float()

    def _step_input(self, chunks: list[ScheduledChunk]) -> StepInput:
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        tables = [torch.tensor(chunk.sequence.block_table) for chunk in chunks]
        sizes = [chunk.num_tokens for chunk in chunks]
        block_ids = torch.cat(
            [table[own // self._block_size] for table, own in zip(tables, torch.split(positions, sizes), strict=True)]
        )
        token_ids, embed_rows, embeds = self._inputs(chunks)
        return StepInput(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=block_ids * self._block_size + positions % self._block_size,
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            query_lengths=torch.tensor(sizes),
            context_lengths=torch.tensor([chunk.end for chunk in chunks]),
            sampling_rows=(torch.tensor(sizes).cumsum(0) - 1)[torch.tensor([chunk.samples for chunk in chunks])],
            embed_rows=torch.tensor(embed_rows, dtype=torch.long),
            embeds=torch.cat([torch.empty(0, self.embedding_size), *embeds]),
        )

    def _inputs(self, chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[torch.Tensor]]:
        """Token ids of all chunks, the rows among them that items' embeddings take, and these."""
        token_ids: list[int] = []
        embed_rows: list[int] = []
        embeds: list[torch.Tensor] = []
        for chunk in chunks:
            row_of_start = len(token_ids)
            chunk_ids = chunk.sequence.token_ids[chunk.start : chunk.end]
            for item in chunk.sequence.items:
                positions, embeddings = item.between(chunk.start, chunk.end)
                for position in positions:
                    # A placeholder's id may lie outside the vocabulary; its embedding is not used.
                    chunk_ids[position - chunk.start] = 0
                if positions:
                    embed_rows += [row_of_start + position - chunk.start for position in positions]
                    embeds.append(embeddings)
            token_ids += chunk_ids
        return token_ids, embed_rows, embeds

    def _attention_metadata(self, step: StepInput) -> AttentionMetadata:
        queries, contexts = step.query_lengths.tolist(), step.context_lengths.tolist()
        # The one-token chunks in front are batched; one that ends a prompt behind a longer chunk is a prefill.
        num_decodes = sum(1 for _ in takewhile(lambda length: length == 1, queries))
        prefills, row = [], num_decodes
        for table, query, context in zip(
            step.block_tables[num_decodes:], queries[num_decodes:], contexts[num_decodes:], strict=True
        ):
            # Made here, once for all layers: each position sees every one up to itself.
            mask = torch.ones(query, context, dtype=torch.bool, device=self._device).tril(context - query)
            block_ids = table[: -(-context // self._block_size)].to(self._device)
            prefills.append(PrefillChunk(row, query, context, block_ids, mask))
            row += query
        return AttentionMetadata(
            self._kv_cache, step.slot_mapping.to(self._device), *self._decode_tables(step, num_decodes), prefills
        )

    def _decode_tables(self, step: StepInput, num_decodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not num_decodes:
            return torch.empty(0, 0, dtype=torch.long), torch.empty(0)
        lengths = step.context_lengths[:num_decodes]
        tables = step.block_tables[:num_decodes, : -(-int(lengths.max()) // self._block_size)]
        mask = torch.arange(tables.shape[1] * self._block_size) < lengths[:, None]
        return tables.to(self._device), mask[:, None, None, :].to(self._device)
