"""A sequence is one answer to a request: its tokens, items, blocks and progress."""

import enum
import time
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raylens.llm.lora.request import LoraRequest
from raylens.llm.prompt_layout import PLAIN, PromptLayout
from raylens.llm.prompt_lookup import PromptLookup
from raylens.llm.states.cross_source import CrossSource

if TYPE_CHECKING:
    # Not at run time: the scheduler needs no torch, and `raylens plan` runs it without.
    import torch


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """The reason for a sequence's end, in OpenAI's terms; `ABORT` and `ERROR` never reach a client as a normal end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class PromptItem:
    """An item of the prompt. `mm_hash`: the hash of its content. `positions`: the prompt positions of its embeddings,
    ascending. `embeddings`: (num_embeds, embedding_size), or None until they arrive."""

    mm_hash: str
    positions: Seq[int]
    embeddings: "torch.Tensor | None"

    def rows_between(self, start: int, end: int) -> slice:
        """Returns the rows of the embeddings whose positions are in [start, end)."""
        return slice(bisect_left(self.positions, start), bisect_left(self.positions, end))


@dataclass(slots=True)
class SequenceTimes:
    """In seconds of `time.perf_counter`; None before the event. Queueing ends at `first_scheduled`."""

    arrival: float = field(default_factory=time.perf_counter)
    first_scheduled: float | None = None
    first_token: float | None = None
    second_token: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer to a request, from its prompt's first token to its latest token.

    `token_ids`: the tokens that the host knows. `num_pending_tokens`: further tokens, with positions but no ids, that
    the device chooses and the host has not read: at most one, and only while the host schedules and launches the next
    step. `pending_row`: its row among the sampled tokens of its step.
    `block_table`: its blocks, in order. They hold keys and values of the first `num_computed_tokens` positions, once
    the device has finished all launched steps.
    `index`: the number of the answer in its request. `parent`: the request's first answer, None for the first itself;
    all answers share its prompt.
    `block_hashes`: hashes of the content of the full blocks, starting from `prefix_root`.
    `num_prompt_logprobs`: the number of likeliest tokens to name at each position of the prompt. None: the prompt is
    not scored. `pooled_from`: the first position of the prompt whose hidden state is pooled. None: none is.
    `num_scored_tokens`: the positions scored or pooled so far.
    `priority`: lower values go first. `turn`: with several tenants, the number of sequences of the same `tenant` before
    this one.
    `num_found_blocks`: while it waits, the number of blocks of its cached prefix at the last lookup.
    `num_overtaking_tokens`: the tokens of later sequences that started while this one was the first to wait for room.
    `lookup`: guesses its next tokens. None: no guesses.
    `state_slot`: the slot of its recurrent state while it runs. `state_source`: the slot that its next chunk continues
    from; None: none, the chunk is the first. `draft_slots`: the slots of the states after each guess of the step.
    `cross_source`: the origin of its cross states; None: it has none. `cross_table`: the blocks of these states while
    it runs. `has_cross_states`: whether these blocks hold the states.
    `lora`: its adapter. `lora_slot`: the adapter's slot in memory; None while a waiting sequence may not use one."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    items: list[PromptItem]
    max_num_tokens: int
    layout: PromptLayout = PLAIN
    index: int = 0
    parent: "Sequence | None" = None
    prefix_root: bytes = b""
    num_prompt_logprobs: int | None = None
    pooled_from: int | None = None
    num_scored_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    priority: int = 0
    lookup: PromptLookup | None = None
    lora: LoraRequest | None = None
    lora_slot: int | None = None
    tenant: str = ""
    turn: int = 0
    arrival_number: int = 0
    num_found_blocks: int = 0
    num_overtaking_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    pending_row: int = 0
    num_cached_tokens: int = 0
    state_slot: int | None = None
    state_source: int | None = None
    draft_slots: list[int] = field(default_factory=list)
    cross_source: CrossSource | None = None
    cross_table: list[int] = field(default_factory=list)
    has_cross_states: bool = False
    finish_reason: FinishReason | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)

    @property
    def num_request_tokens(self) -> int:
        """Returns the number of tokens of the request's prompt, those of its cross states among them."""
        return self.num_prompt_tokens if self.cross_source is None else self.cross_source.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Returns the number of positions, of known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Returns the number of known tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_nameable_tokens(self) -> int:
        """Returns the number of computed positions with known tokens, whose full blocks can be hashed."""
        return min(self.num_computed_tokens, len(self.token_ids))

    @property
    def awaits_last_token(self) -> bool:
        """Returns whether the sequence's last possible token is pending. The sequence ends when the host reads it."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def awaits_embeddings(self) -> bool:
        """Returns whether the prompt is not computed yet and some of its embeddings have not arrived."""
        return not self.is_prompt_computed and any(item.embeddings is None for item in self.items)

    @property
    def num_ready_tokens(self) -> int:
        """Returns the number of positions that may be computed: up to the first uncomputed one with a missing
        embedding. The prompt's last position waits for all embeddings, even those with cached positions: a preempted
        sequence would need them again, and the caller may still fail to deliver them. Cross states need all embeddings,
        and any position may depend on all of them."""
        if self.cross_source is not None and self.awaits_embeddings:
            return 0
        if self.num_computed_tokens >= self.num_prompt_tokens:
            return self.num_tokens
        awaited = (item.positions for item in self.items if item.embeddings is None)
        starts = [at[bisect_left(at, self.num_computed_tokens)] for at in awaited if at[-1] >= self.num_computed_tokens]
        return min(starts, default=self.num_prompt_tokens - 1 if self.awaits_embeddings else self.num_tokens)

    @property
    def reuses_prefix(self) -> bool:
        """Returns whether the sequence may reuse cached blocks. Scoring its prompt first needs all logits of the
        prompt, and pooling it may need all hidden states."""
        is_read = self.num_prompt_logprobs is not None or self.pooled_from == 0
        return not is_read or self.num_scored_tokens >= self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    def last_whole(self, end: int) -> int:
        """Returns the greatest position up to `end` where a chunk may end: outside of spans."""
        for span in self.layout.spans:
            if span.start < end < span.end:
                return span.start
        return end

    def end_of_span(self, position: int) -> int:
        """Returns the end of the span around `position`, or the next position if there is no such span."""
        return next((span.end for span in self.layout.spans if span.start <= position < span.end), position + 1)

    @property
    def outgrows_layout(self) -> bool:
        return self.layout.longest is not None and self.num_tokens > self.layout.longest

    def take_next_layout(self) -> None:
        """Takes the layout for more tokens. None of the sequence's keys may be computed."""
        assert self.layout.beyond is not None
        assert not self.num_computed_tokens
        self.layout = self.layout.beyond
        self.block_hashes.clear()
        self.num_found_blocks = 0

    def add_pending_token(self, row: int) -> None:
        """Notes that a token's choice has been launched, in this row of the step's sampled tokens."""
        self.num_pending_tokens += 1
        self.pending_row = row

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        elif self.times.second_token is None:
            self.times.second_token = time.perf_counter()
