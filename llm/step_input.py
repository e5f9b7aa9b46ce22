"""One step's chunks as plain numbers and tensors on the CPU: all that running the model takes, on any rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from llm.prompt_layout import BidirectionalSpan
from llm.scheduler import ScheduledChunk
from llm.sequence import Sequence as SequenceState

_NONE = torch.empty(0, dtype=torch.int64)


@cache
def _no_embeds(embedding_size: int) -> torch.Tensor:
    return torch.empty(0, embedding_size)


@dataclass(slots=True)
class StepInput:
    """A step's chunks, flattened one behind the other, decode chunks first.

    What the model's layers read, int64:
    token_ids (num_tokens,): any valid id where item embeddings stand in for the tokens'
    positions (num_rope_axes, num_tokens): rotary positions
    slot_mapping (num_tokens,): where keys and values go, block_id * block_size + offset
    logits_rows (num_sampling,): the tokens whose logits are wanted
    embed_rows (num_embeds,), ascending, and `embeds` (num_embeds, embedding_size), float: item embeddings

    What decides how it is run:
    block_tables, query_lengths, context_lengths: of each chunk; the tokens that it has, the positions up to its end
    span_members: chunk, index of a bidirectional span, and position in the sequence
    scored: rows whose logits are to say how likely the next token of the prompt was, this one, and how many of the
    likeliest are wanted
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor
    embed_rows: torch.Tensor
    embeds: torch.Tensor
    block_tables: list[list[int]]
    query_lengths: list[int]
    context_lengths: list[int]
    span_members: list[tuple[int, int, int]]
    scored: list[tuple[int, int, int]]

    @property
    def num_decodes(self) -> int:
        """Chunks of one token at the front; one that ends a prompt behind a longer chunk counts as prefill."""
        return next((index for index, length in enumerate(self.query_lengths) if length > 1), len(self.query_lengths))

    def spans_of(self, chunk: int) -> list[BidirectionalSpan]:
        """The spans that the chunk computes, or the rest of."""
        members: dict[int, list[int]] = {}
        for owner, span, position in self.span_members:
            if owner == chunk:
                members.setdefault(span, []).append(position)
        return [BidirectionalSpan.of(positions) for positions in members.values()]

    def to(self, device: torch.device) -> "StepInput":
        """The same with its tensors on `device`."""
        if device.type == "cpu":
            return self
        names = ("token_ids", "positions", "slot_mapping", "logits_rows", "embed_rows", "embeds")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def build_step(
    chunks: Sequence[ScheduledChunk], *, block_size: int, num_rope_axes: int, embedding_size: int, keeps_tokens: bool
) -> StepInput:
    """`keeps_tokens`: whether ids of placeholders are looked up like any other; they may lie outside the vocabulary."""
    builder = _StepBuilder(block_size, num_rope_axes)
    for chunk in chunks:
        if chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt_tokens:
            builder.add_decode(chunk.sequence)
        else:
            builder.add_prefill(chunk)
    return builder.build(embedding_size, keeps_tokens)


def slots_of(blocks: Sequence[int], start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Where the positions [start, end) of a sequence on `blocks` lie in the cache."""
    positions = np.arange(start, end)
    return np.asarray(blocks)[positions // block_size] * block_size + positions % block_size


class _StepBuilder:
    """Plain lists that grow chunk by chunk: for the few tokens of a decode step they are faster than arrays."""

    def __init__(self, block_size: int, num_rope_axes: int) -> None:
        self._block_size = block_size
        self._token_ids: list[int] = []
        self._positions: list[list[int]] = [[] for _ in range(num_rope_axes)]
        self._slots: list[int] = []
        self._tables: list[list[int]] = []
        self._query_lengths: list[int] = []
        self._context_lengths: list[int] = []
        self._logits_rows: list[int] = []
        self._span_members: list[tuple[int, int, int]] = []
        self._scored: list[tuple[int, int, int]] = []
        self._embed_rows: list[int] = []
        self._embeds: list[torch.Tensor] = []

    def add_decode(self, sequence: SequenceState) -> None:
        """A generated token: nothing but itself and its place."""
        position = sequence.num_computed_tokens
        self._logits_rows.append(len(self._token_ids))
        self._token_ids.append(sequence.token_ids[position])
        for axis in self._positions:
            axis.append(position + sequence.layout.rope_offset)
        block_id = sequence.block_table[position // self._block_size]
        self._slots.append(block_id * self._block_size + position % self._block_size)
        self._tables.append(sequence.block_table)
        self._query_lengths.append(1)
        self._context_lengths.append(position + 1)

    def add_prefill(self, chunk: ScheduledChunk) -> None:
        sequence, start, end, row = chunk.sequence, chunk.start, chunk.end, len(self._token_ids)
        self._add_items(chunk, row)
        self._add_spans(chunk)
        if chunk.samples:
            self._logits_rows.append(row + chunk.num_tokens - 1)
        for i in chunk.scored_tokens:
            self._scored.append((row + i, sequence.token_ids[start + i + 1], sequence.num_prompt_logprobs or 0))
        self._token_ids += sequence.token_ids[start:end]
        positions = sequence.layout.positions(start, end)
        for axis, own in zip(
            self._positions, np.broadcast_to(positions, (len(self._positions), end - start)), strict=True
        ):
            axis += own.tolist()
        self._slots += slots_of(sequence.block_table, start, end, self._block_size).tolist()
        self._tables.append(sequence.block_table)
        self._query_lengths.append(chunk.num_tokens)
        self._context_lengths.append(end)

    def _add_items(self, chunk: ScheduledChunk, row: int) -> None:
        for item in chunk.sequence.items:
            positions, embeddings = item.between(chunk.start, chunk.end)
            if positions:
                self._embed_rows += [row + position - chunk.start for position in positions]
                self._embeds.append(embeddings)

    def _add_spans(self, chunk: ScheduledChunk) -> None:
        row = len(self._tables)
        for index, span in enumerate(chunk.sequence.layout.spans):
            if chunk.start < span.end and span.start < chunk.end:
                self._span_members += [(row, index, position) for position in span.members]

    def build(self, embedding_size: int, keeps_tokens: bool) -> StepInput:
        if not keeps_tokens:
            for row in self._embed_rows:
                self._token_ids[row] = 0
        embed_rows, embeds = _NONE, _no_embeds(embedding_size)
        if self._embeds:
            embed_rows, order = torch.tensor(self._embed_rows).sort()
            embeds = torch.cat(self._embeds)[order]
        # One tensor for all: to make one takes longer than to fill it.
        integers = torch.tensor([*self._token_ids, *self._slots, *self._logits_rows, *chain(*self._positions)])
        num_tokens = len(self._token_ids)
        sizes = [num_tokens, num_tokens, len(self._logits_rows), num_tokens * len(self._positions)]
        token_ids, slots, logits_rows, positions = integers.split_with_sizes(sizes)
        return StepInput(
            token_ids=token_ids,
            positions=positions.view(-1, num_tokens),
            slot_mapping=slots,
            logits_rows=logits_rows,
            embed_rows=embed_rows,
            embeds=embeds,
            block_tables=self._tables,
            query_lengths=self._query_lengths,
            context_lengths=self._context_lengths,
            span_members=self._span_members,
            scored=self._scored,
        )
