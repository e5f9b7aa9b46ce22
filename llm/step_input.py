"""One step's chunks as plain tensors on the CPU: all that running the model takes, on this rank or on another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from llm.prompt_layout import BidirectionalSpan
from llm.scheduler import ScheduledChunk

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's chunks, flattened one behind the other, decode chunks first; integers are int64.

    token_ids (num_tokens,): any valid id where item embeddings stand in for the tokens'
    positions (num_rope_axes, num_tokens): rotary positions
    slot_mapping (num_tokens,): where keys and values go, block_id * block_size + offset
    block_tables (num_chunks, max_blocks): padded with block 0
    query_lengths, context_lengths (num_chunks,): tokens of the chunk; positions up to its end
    span_members (num_members, 3): chunk, bidirectional span, and position in the sequence
    logits_rows (num_sampling,): the tokens whose logits are wanted
    scored_rows, scored_token_ids, num_logprobs (num_scored,): tokens whose logits are to say how likely the next one
    of the prompt was, this one, and how many of the likeliest are wanted
    embed_rows (num_embeds,), embeds (num_embeds, embedding_size): item embeddings and where they belong, ascending
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lengths: torch.Tensor
    context_lengths: torch.Tensor
    span_members: torch.Tensor
    logits_rows: torch.Tensor
    scored_rows: torch.Tensor
    scored_token_ids: torch.Tensor
    num_logprobs: torch.Tensor
    embed_rows: torch.Tensor
    embeds: torch.Tensor

    @property
    def num_decodes(self) -> int:
        """Chunks of one token at the front; one that ends a prompt behind a longer chunk counts as prefill."""
        is_longer = self.query_lengths != 1
        return int(is_longer.int().argmax()) if bool(is_longer.any()) else len(self.query_lengths)

    def spans_of(self, chunk: int) -> list[BidirectionalSpan]:
        """The spans that the chunk computes, or the rest of."""
        own = self.span_members[self.span_members[:, 0] == chunk]
        return [BidirectionalSpan.of(own[own[:, 1] == index, 2].tolist()) for index in sorted(set(own[:, 1].tolist()))]

    def to(self, device: torch.device) -> "StepInput":
        """The same with what the model's layers read on `device`; what only decides how to run stays on the CPU."""
        names = ("token_ids", "positions", "slot_mapping", "logits_rows", "scored_rows", "embed_rows", "embeds")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def build_step(
    chunks: Sequence[ScheduledChunk], *, block_size: int, num_rope_axes: int, embedding_size: int, keeps_tokens: bool
) -> StepInput:
    """`keeps_tokens`: whether ids of placeholders are looked up like any other; they may lie outside the vocabulary."""
    lengths = np.array([chunk.num_tokens for chunk in chunks])
    row_of_start = np.cumsum(lengths) - lengths
    token_ids = np.fromiter(
        chain.from_iterable(chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks), np.int64
    )
    embed_rows, embeds = _embeds(chunks, row_of_start, embedding_size)
    if not keeps_tokens:
        token_ids[embed_rows] = 0
    scored = [(row + i, chunk, i) for row, chunk in zip(row_of_start, chunks, strict=True) for i in chunk.scored_tokens]
    samples = np.array([chunk.samples for chunk in chunks])
    return StepInput(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(np.concatenate([_positions(chunk, num_rope_axes) for chunk in chunks], axis=1)),
        slot_mapping=torch.from_numpy(np.concatenate([_slots(chunk, block_size) for chunk in chunks])),
        block_tables=torch.from_numpy(_block_tables(chunks)),
        query_lengths=torch.from_numpy(lengths),
        context_lengths=_int64(chunk.end for chunk in chunks),
        span_members=_span_members(chunks),
        logits_rows=torch.from_numpy((row_of_start + lengths - 1)[samples]),
        scored_rows=_int64(row for row, _, _ in scored),
        scored_token_ids=_int64(chunk.sequence.token_ids[chunk.start + i + 1] for _, chunk, i in scored),
        num_logprobs=_int64(chunk.sequence.num_prompt_logprobs or 0 for _, chunk, _ in scored),
        embed_rows=torch.from_numpy(embed_rows),
        embeds=embeds,
    )


def _int64(values: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64))


def _positions(chunk: ScheduledChunk, num_axes: int) -> IntArray:
    positions = chunk.sequence.layout.positions(chunk.start, chunk.end)
    return np.broadcast_to(positions, (num_axes, chunk.num_tokens))


def _slots(chunk: ScheduledChunk, block_size: int) -> IntArray:
    table = chunk.sequence.block_table
    if chunk.num_tokens == 1:
        return np.array([table[chunk.start // block_size] * block_size + chunk.start % block_size])
    indices = np.arange(chunk.start, chunk.end)
    return np.array(table)[indices // block_size] * block_size + indices % block_size


def _block_tables(chunks: Sequence[ScheduledChunk]) -> IntArray:
    tables = np.zeros((len(chunks), max(len(chunk.sequence.block_table) for chunk in chunks)), np.int64)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.block_table)] = chunk.sequence.block_table
    return tables


def _span_members(chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
    members = [
        (row, index, position)
        for row, chunk in enumerate(chunks)
        for index, span in enumerate(chunk.sequence.layout.spans)
        if chunk.start < span.end and span.start < chunk.end
        for position in span.members
    ]
    return torch.tensor(members, dtype=torch.int64).view(-1, 3)


def _embeds(
    chunks: Sequence[ScheduledChunk], row_of_start: IntArray, embedding_size: int
) -> tuple[IntArray, torch.Tensor]:
    rows: list[IntArray] = []
    embeds: list[torch.Tensor] = []
    for row, chunk in zip(row_of_start, chunks, strict=True):
        for item in chunk.sequence.items:
            positions, embeddings = item.between(chunk.start, chunk.end)
            if positions:
                rows.append(row + np.array(positions) - chunk.start)
                embeds.append(embeddings)
    if not rows:
        return np.empty(0, np.int64), torch.empty(0, embedding_size)
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(rows)[order], torch.cat(embeds)[torch.from_numpy(order)]
