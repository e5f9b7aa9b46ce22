"""One step's chunks as plain numbers and tensors on the CPU: the model's whole input on any rank."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raylens.llm.host_values import HostValues
from raylens.llm.lora.request import NO_SLOT
from raylens.llm.prompt_layout import BidirectionalSpan
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence as SequenceState
from raylens.llm.states.cross_source import CrossSource, CrossView

_NONE = torch.empty(0, dtype=torch.int64)

# The rows of a builder's integers. The rotary positions follow, a row for each axis.
_TOKEN, _SLOT, _LOGITS, _NUM_FIXED = range(4)
TENSORS = ("token_ids", "positions", "slot_mapping", "logits_rows", "embed_rows")
"""The fields of a StepInput that are tensors."""


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens of a step, chosen by the previous step, that the host has not read: the token of `rows[i]` is
    `chosen[sources[i]]`. `chosen`: (tokens sampled by the previous step,), int64, on the device, which computes it
    before this step in stream order. `rows` and `sources` are on the host."""

    chosen: torch.Tensor
    rows: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]

    def plan(self, values: HostValues) -> Callable[[torch.Tensor], None]:
        """Adds `rows` and `sources` to `values`. Returns a function that writes the tokens to all rows' token ids on
        the device."""
        rows, sources = values.add(self.rows), values.add(self.sources)

        def feed(token_ids: torch.Tensor) -> None:
            token_ids[values[rows]] = self.chosen[values[sources]].to(token_ids.dtype)

        return feed


@dataclass(frozen=True, slots=True)
class StateChunk:
    """The slots of a chunk's recurrent state. It continues from `source`, None: it is a sequence's first chunk, and
    ends in `target`. `save_to`: the slot of a snapshot after `save_at` of its tokens. None: no slot is written.
    `depth`: the number of chunks of this step that it continues from, for a guess."""

    source: int | None = None
    target: int | None = None
    save_at: int = 0
    save_to: int | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class CrossChunk:
    """The cross states of a chunk with its guesses. `table`: the blocks of the sequence's states. `views`: what its
    tokens attend to, each with its number of tokens. `source`: the origin of the states, if the step has to compute
    them from the items' `embeds`."""

    table: list[int]
    views: list[tuple[int, CrossView]]
    source: CrossSource | None = None
    embeds: Sequence[torch.Tensor] = ()


@dataclass(slots=True)
class StepInput:
    """A step's chunks, concatenated, decode chunks first. Each guessed token is a chunk of its own, after the token
    that it follows.

    The model's layers read these tensors, int64 but for `embeds`:
    token_ids (num_tokens,): any valid id at positions whose token embedding is replaced
    positions (num_rope_axes, num_tokens): rotary positions
    slot_mapping (num_tokens,): the cache slot of each token, block_id * block_size + offset
    logits_rows (num_sampling,): the tokens whose logits are needed
    embed_rows (num_embeds,): the tokens with an item embedding, ascending
    embeds: these item embeddings, float, as consecutive tensors of (any number, embedding_size)

    These lists describe the chunks:
    block_tables: the block table of each chunk's sequence
    query_lengths: the number of tokens of each chunk
    context_lengths: the number of positions up to each chunk's end
    prompt_lengths: the number of positions of the prompt of each chunk's sequence
    span_members: (chunk, index of a bidirectional span, position in the sequence) for each member of a span
    scored: (row, next token of the prompt, number of likeliest tokens to name) for each row of the flattened tokens
    whose logits score the next token
    pooled: (first row, row after the last) of the flattened tokens of each chunk whose hidden states are pooled

    cross: of each chunk with its guesses, for a model with cross states
    states: of each chunk, for a model with recurrent states. Empty: nothing is read or written

    row_slots (num_tokens,): on the CPU, the slot of each token's adapter, see `LoraLayers`. None: no adapters
    fed: the tokens whose ids only the device knows; `token_ids` has 0 for them. None: the host knows all"""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor
    embed_rows: torch.Tensor = _NONE
    embeds: list[torch.Tensor] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    query_lengths: list[int] = field(default_factory=list)
    context_lengths: list[int] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    span_members: list[tuple[int, int, int]] = field(default_factory=list)
    scored: list[tuple[int, int, int]] = field(default_factory=list)
    pooled: list[tuple[int, int]] = field(default_factory=list)
    cross: list[CrossChunk] = field(default_factory=list)
    states: list[StateChunk] = field(default_factory=list)
    row_slots: torch.Tensor | None = None
    fed: FedTokens | None = None

    @property
    def reads_hidden(self) -> bool:
        """Returns whether hidden states are needed beside the logits."""
        return bool(self.scored or self.pooled)

    @property
    def num_decodes(self) -> int:
        """Returns the number of leading chunks of one token. Such a chunk after a longer one counts as prefill."""
        return next((index for index, length in enumerate(self.query_lengths) if length > 1), len(self.query_lengths))

    def spans_of(self, chunk: int) -> list[BidirectionalSpan]:
        """Returns the bidirectional spans that the chunk computes in whole or in part."""
        members: dict[int, list[int]] = {}
        for owner, span, position in self.span_members:
            if owner == chunk:
                members.setdefault(span, []).append(position)
        return [BidirectionalSpan.of(positions) for positions in members.values()]

    def to(self, device: torch.device) -> "StepInput":
        """Returns the same step with its tensors on `device`, and with all token ids. The host waits for no copy. The
        next step may reuse this step's memory at once."""
        if device.type == "cpu" and self.fed is None:
            return self
        values = HostValues(device)
        indexes = {name: values.add(getattr(self, name).numpy()) for name in TENSORS}
        feed = None if self.fed is None else self.fed.plan(values)
        values.upload()
        tensors: dict[str, Any] = {name: values[index] for name, index in indexes.items()}
        if feed is not None:
            feed(tensors["token_ids"])
        return replace(self, **tensors, embeds=[_sent(piece, device) for piece in self.embeds], fed=None)


@dataclass(slots=True)
class StepOutput:
    """The logits, float32 (num_sampling, vocab), the `prompt_logprobs` of all chunks' `scored_tokens`, in order, and
    what the pooler made of each chunk's `pooled_tokens`."""

    logits: torch.Tensor
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)


def _sent(embeds: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns embeddings on the device. `ModelRunner.stage_embeddings` has usually pinned them already."""
    if device.type == "cuda" and embeds.device.type == "cpu" and not embeds.is_pinned():
        embeds = embeds.pin_memory()
    return embeds.to(device, non_blocking=True)


def slots_of(blocks: Sequence[int], start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Returns the cache slots of the positions [start, end) of a sequence on `blocks`."""
    positions = np.arange(start, end)
    return np.asarray(blocks)[positions // block_size] * block_size + positions % block_size


class StepBuilder:
    """Builds steps in reused memory, each valid until the next one is built. A decode-only step thus creates no
    tensors: after a forward pass PyTorch's code has left the processor's caches, and a call takes some 30
    microseconds."""

    def __init__(
        self, *, max_num_tokens: int, block_size: int, num_rope_axes: int, keeps_tokens: bool, has_loras: bool = False
    ) -> None:
        """`keeps_tokens`: whether the model looks up placeholders' ids. Otherwise they become 0, because they may lie
        outside the vocabulary. `has_loras`: whether sequences may have adapters."""
        self.max_num_tokens = max_num_tokens
        self._block_size = block_size
        self._keeps_tokens = keeps_tokens
        self._has_loras = has_loras
        num_rows = _NUM_FIXED + num_rope_axes
        self._integers = array("q", bytes(8 * num_rows * max_num_tokens))  # the fastest way to write single numbers
        self._rows = np.frombuffer(self._integers, dtype=np.int64).reshape(num_rows, max_num_tokens)
        self._tensor = torch.from_numpy(self._rows)
        self._starts = range(0, num_rows * max_num_tokens, max_num_tokens)
        self._views = lru_cache(maxsize=256)(self._make_views)

    def build(self, chunks: Sequence[ScheduledChunk], chosen: torch.Tensor | None = None) -> StepInput:
        """Returns the step of `chunks`: decode chunks first, at most `max_num_tokens` tokens. `chosen`: the previous
        step's chosen tokens, on the device, if some are pending."""
        self._num_tokens = self._num_logits = 0
        self._embed_rows: list[int] = []
        self._fed: list[tuple[int, int]] = []
        self._step = step = StepInput(_NONE, _NONE, _NONE, _NONE)
        for chunk in chunks:
            if chunk.sequence.state_slot is not None:
                step.states += _state_chunks(chunk)
            if chunk.sequence.cross_source is not None:
                step.cross.append(_cross_chunk(chunk, chunk.sequence.cross_source))
            if chunk.decodes:
                self._add_decodes(chunk)
            else:
                self._add_prefill(chunk)
        assert self._num_tokens <= self.max_num_tokens, "a token has overwritten another's row"
        if step.embeds:
            self._place_items()
        step.token_ids, step.slot_mapping, step.logits_rows, step.positions = self._views(
            self._num_tokens, self._num_logits
        )
        if self._has_loras:
            step.row_slots = _row_slots(chunks)
        if self._fed:
            assert chosen is not None, "a token is pending that no step has chosen"
            rows, sources = np.array(self._fed, dtype=np.int64).T
            step.fed = FedTokens(chosen, rows, sources)
        return step

    def _make_views(self, num_tokens: int, num_logits: int) -> tuple[torch.Tensor, ...]:
        rows = self._tensor[:, :num_tokens]
        positions = rows[_NUM_FIXED:]
        if len(positions) == 1:  # drops the stride between rows, which compiled layers would specialise on
            positions = positions[0].unsqueeze(0)
        return rows[_TOKEN], rows[_SLOT], self._tensor[_LOGITS, :num_logits], positions

    def _add_decodes(self, chunk: ScheduledChunk) -> None:
        """Adds a generated token and the guesses after it."""
        sequence = chunk.sequence
        if sequence.num_pending_tokens:
            assert not chunk.draft, "guesses follow from the token before them"
            self._fed.append((self._num_tokens, sequence.pending_row))
            self._add_decode(sequence, chunk.start, 0)
            return
        for position, token_id in enumerate([sequence.token_ids[-1], *chunk.draft], chunk.start):
            self._add_decode(sequence, position, token_id)

    def _add_decode(self, sequence: SequenceState, position: int, token_id: int) -> None:
        """Adds a generated or guessed token."""
        integers, row = self._integers, self._num_tokens
        tokens, slots, logits, *axes = self._starts
        block_id = sequence.block_table[position // self._block_size]
        integers[tokens + row] = token_id
        integers[slots + row] = block_id * self._block_size + position % self._block_size
        integers[logits + self._num_logits] = row
        for axis, offset in zip(axes, sequence.layout.rope_offsets, strict=True):
            integers[axis + row] = position + offset
        self._num_tokens += 1
        self._num_logits += 1
        step = self._step
        step.block_tables.append(sequence.block_table)
        step.query_lengths.append(1)
        step.context_lengths.append(position + 1)
        step.prompt_lengths.append(sequence.num_prompt_tokens)

    def _add_prefill(self, chunk: ScheduledChunk) -> None:
        sequence, start, end, row = chunk.sequence, chunk.start, chunk.end, self._num_tokens
        step = self._step
        own = self._rows[:, row : row + chunk.num_tokens]
        own[_TOKEN] = sequence.token_ids[start:end]
        own[_SLOT] = slots_of(sequence.block_table, start, end, self._block_size)
        own[_NUM_FIXED:] = sequence.layout.positions(start, end)
        for item in sequence.items:
            rows = item.rows_between(start, end)
            if positions := item.positions[rows]:
                assert item.embeddings is not None, "scheduled before its embeddings had arrived"
                self._embed_rows += [row + position - start for position in positions]
                step.embeds.append(item.embeddings[rows])
        for index, span in enumerate(sequence.layout.spans):
            if start < span.end and span.start < end:
                number = len(step.block_tables)
                step.span_members += [(number, index, position) for position in span.members]
        for i in chunk.scored_tokens:
            step.scored.append((row + i, sequence.token_ids[start + i + 1], sequence.num_prompt_logprobs or 0))
        if pooled := chunk.pooled_tokens:
            step.pooled.append((row + pooled.start, row + pooled.stop))
        if chunk.samples:
            self._rows[_LOGITS, self._num_logits] = row + chunk.num_tokens - 1
            self._num_logits += 1
        self._num_tokens += chunk.num_tokens
        step.block_tables.append(sequence.block_table)
        step.query_lengths.append(chunk.num_tokens)
        step.context_lengths.append(end)
        step.prompt_lengths.append(sequence.num_prompt_tokens)

    def _place_items(self) -> None:
        """Sets the rows of the items' embeddings, ascending, and sorts the embeddings accordingly. Only embeddings of
        interleaved items are copied, because copying a large picture's embeddings would delay this thread."""
        rows = np.array(self._embed_rows)
        if not self._keeps_tokens:
            self._rows[_TOKEN, rows] = 0
        if not (np.diff(rows) > 0).all():
            order = np.argsort(rows)
            rows, self._step.embeds = rows[order], [torch.cat(self._step.embeds)[torch.from_numpy(order)]]
        self._step.embed_rows = torch.from_numpy(rows)


def _state_chunks(chunk: ScheduledChunk) -> list[StateChunk]:
    """Returns the slots of the chunk and of each guess after it, which continues from the state before."""
    sequence, (at, slot) = chunk.sequence, chunk.snapshot or (chunk.start, None)
    starts = [chunk.start, *range(chunk.end, chunk.end + len(chunk.draft))]
    targets = [sequence.state_slot, *sequence.draft_slots]
    sources = [sequence.state_source, *targets[:-1]]
    return [
        StateChunk(sources[depth], targets[depth], at - start, slot if start < at <= chunk.end + depth else None, depth)
        for depth, start in enumerate(starts)
    ]


def _cross_chunk(chunk: ScheduledChunk, source: CrossSource) -> CrossChunk:
    sequence = chunk.sequence
    views = source.views_between(chunk.start, chunk.end + len(chunk.draft))
    if sequence.has_cross_states:
        return CrossChunk(sequence.cross_table, views)
    embeds = [one.embeddings for one in sequence.items if one.embeddings is not None]
    return CrossChunk(sequence.cross_table, views, source, embeds)


def _row_slots(chunks: Sequence[ScheduledChunk]) -> torch.Tensor | None:
    slots = [NO_SLOT if chunk.sequence.lora_slot is None else chunk.sequence.lora_slot for chunk in chunks]
    if all(slot == NO_SLOT for slot in slots):
        return None
    return torch.from_numpy(np.repeat(slots, [chunk.num_tokens + len(chunk.draft) for chunk in chunks]))
