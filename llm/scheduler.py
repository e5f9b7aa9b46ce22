"""Chooses the sequences of the next step and their numbers of tokens: continuous batching, chunked prefill."""

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter

from raylens.llm.block_manager import BlockManager
from raylens.llm.sequence import FinishReason, Sequence, SequenceStatus
from raylens.llm.step_budget import StepBudget
from raylens.llm.tenant_share import TenantShare

_MIN_TOKENS_BEFORE_MISSING = 32
"""The fewest tokens that are worth a step of their own before the next embeddings have arrived."""


class ScheduledChunk:
    """The next `num_tokens` uncomputed positions of a sequence, [start, end).

    `is_last`: whether the chunk reaches the sequence's last token.
    `samples`: whether a token is sampled after the chunk. False after the last chunk if `max_tokens` is 0.
    `draft`: guesses of the tokens after a decode chunk, computed in the same step.
    `snapshot`: see `BlockManager.plan_snapshot`."""

    __slots__ = ("draft", "end", "is_last", "num_tokens", "samples", "sequence", "snapshot", "start")

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.start = sequence.num_computed_tokens
        self.end = self.start + num_tokens
        self.is_last = self.end == sequence.num_tokens
        self.samples = self.is_last and self.end < sequence.max_num_tokens
        self.draft: list[int] = []
        self.snapshot: tuple[int, int] | None = None

    @property
    def decodes(self) -> bool:
        """Returns whether the chunk is a single generated token, after which the next one is sampled."""
        return self.samples and self.num_tokens == 1 and self.start >= self.sequence.num_prompt_tokens

    @property
    def scored_tokens(self) -> range:
        """Returns the chunk's tokens, counted from its start, whose logits score the next prompt token."""
        sequence = self.sequence
        if sequence.num_prompt_logprobs is None:
            return range(0)
        last = min(self.end, sequence.num_prompt_tokens - 1)
        return range(max(self.start, sequence.num_scored_tokens) - self.start, last - self.start)

    @property
    def pooled_tokens(self) -> range:
        """Returns the chunk's tokens, counted from its start, whose hidden states are pooled."""
        sequence = self.sequence
        if sequence.pooled_from is None:
            return range(0)
        return range(max(self.start, sequence.pooled_from, sequence.num_scored_tokens) - self.start, self.num_tokens)


class Scheduler:
    """Divides each step's token budget among sequences. Decoding sequences come first, with one token each, so that no
    prompt delays a stream. `step_budget` limits the prompt tokens beside them.

    Running and waiting prompts share these tokens. A lower `priority` goes first. Within a priority,
    `short_prompt_share` of the tokens go to the prompts with the fewest tokens left, so that a short prompt does not
    wait behind long ones. The rest goes by arrival, so that each prompt progresses. A prompt starts only if all its
    blocks are free. While a prompt waits for blocks, later prompts may overtake it, up to a total of its own token
    count. When blocks run out, the running sequence of the highest rank is preempted and recomputed later.

    Tenants take turns: within a priority, the first sequences of all tenants precede the second ones, and so on. A
    prompt without room preempts sequences with a later turn, which belong to tenants with more running sequences. A
    single tenant may thus fill the engine, and another tenant still starts at once, up to an equal part of the places.
    For a tenant with more running sequences than others, only some decode in each step, see `TenantShare`.

    A chunk ends before the first position with a missing embedding. A very short chunk waits for that embedding. A
    chunk never ends within a bidirectional span. A span longer than the budget takes a step with decoding sequences but
    without other prompts. Later steps compensate short prompts for the excess. Sequences that wait for embeddings may
    take up to half of the places. Sequences with guesses share the rest of `max_draft_rows` rows."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_draft_rows: int = 0,
        *,
        step_budget: StepBudget | None = None,
        short_prompt_share: float = 0.5,
    ) -> None:
        """`max_draft_rows`: the most decode tokens of a step with guesses, guesses included."""
        self._block_manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_draft_rows = min(max_draft_rows, max_num_seqs)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step_budget = step_budget or StepBudget()
        self._short_prompt_share = short_prompt_share
        self._budget = 0
        self._arrival_credit = 0
        self.num_decodes = 0
        """The number of decode chunks in the latest result of `schedule`. They come first."""
        self._num_arrived = 0
        self._num_unfinished: Counter[str] = Counter()  # by tenant
        self._takes_turns = self._has_changed = False
        self._tenant_share = TenantShare()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_prefill_tokens = self.num_decoded_sequences = 0
        self.num_prefix_queries = self.num_prefix_hits = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_lacking_tokens(self) -> int:
        """The prompt tokens still to compute. Thread-safe."""
        waiting = sum(sequence.num_tokens for sequence in list(self.waiting))
        begun = [sequence.num_uncomputed_tokens for sequence in list(self.running)]
        return waiting + sum(lacking for lacking in begun if lacking > 1)

    def add(self, sequence: Sequence) -> None:
        sequence.arrival_number = self._num_arrived
        self._num_arrived += 1
        self._num_unfinished[sequence.tenant] += 1
        self._has_changed = True
        insort(self.waiting, sequence, key=_rank)

    def schedule(self) -> list[ScheduledChunk]:
        """Chooses the next step's chunks, allocates their blocks and returns them, decode chunks (of one token) first.
        With unfinished sequences the list is empty only if all of them wait: for embeddings, adapters or unread
        tokens."""
        if self._has_changed:
            self._set_turns()
        self._budget = self._max_num_batched_tokens
        chunks: dict[Sequence, ScheduledChunk] = {}
        for sequence in [one for one in self.running if one.outgrows_layout]:
            self._preempt(sequence, chunks)
        prompts = self._prompts()
        ready = self._ready()
        if self._takes_turns and ready:
            beside = {one.tenant for one in prompts if one.num_computed_tokens < _end_of_ready(one)}
            ready = self._tenant_share.choose(ready, beside)
        self._decode(ready, chunks)
        if prompts:
            decoding = list(chunks)
            self._take_up_prompts(prompts, chunks)
            self.num_decodes = sum(sequence in chunks for sequence in decoding)  # prompts may have preempted some
        if not chunks:  # the chosen sequences found no blocks, and preempted themselves
            self._decode(self._ready(), chunks)
        if self._max_draft_rows > len(chunks):
            self._add_drafts(list(chunks.values()))
        for chunk in chunks.values():
            end = chunk.end + len(chunk.draft)
            chunk.snapshot = self._block_manager.plan_snapshot(chunk.sequence, chunk.start, end)
        return list(chunks.values())

    def _prompts(self) -> list[Sequence]:
        """Returns the running prompts, and the waiting ones that may start in this step."""
        running = [one for one in self.running if one.num_uncomputed_tokens > 1]
        waiting = self._first_of_tenants() if self._takes_turns else filter(self._may_start, self._with_places())
        return [*running, *waiting]

    def _first_of_tenants(self) -> Iterable[Sequence]:
        """Yields startable waiting sequences, for each tenant at most as many as it could get places for."""
        num_places = dict.fromkeys(self._num_unfinished, self._max_num_seqs)
        for running in self.running:
            num_places[running.tenant] -= 1
        for waiting in self._with_places():
            if num_places[waiting.tenant] > 0 and self._may_start(waiting):
                num_places[waiting.tenant] -= 1
                yield waiting

    def _decode(self, sequences: list[Sequence], chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Schedules the next token of each sequence."""
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:  # preempted for one before it
                continue
            if num_tokens := self._chunk_size(sequence, chunks):
                self._take(sequence, num_tokens, chunks)
        self.num_decodes = len(chunks)

    def _ready(self) -> list[Sequence]:
        """Returns the sequences that can decode."""
        return [one for one in self.running if one.num_uncomputed_tokens == 1 and not one.awaits_last_token]

    def _set_turns(self) -> None:
        """Numbers the sequences of each tenant, running ones first. With a single tenant all turns are 0."""
        self._has_changed = False
        if len(self._num_unfinished) < 2 and not self._takes_turns:
            return
        self._takes_turns = len(self._num_unfinished) > 1
        turns: Counter[str] = Counter()
        for sequence in [*sorted(self.running, key=_arrival), *sorted(self.waiting, key=_arrival)]:
            sequence.turn = turns[sequence.tenant] if self._takes_turns else 0
            turns[sequence.tenant] += 1
        self.waiting = deque(sorted(self.waiting, key=_rank))

    def note_step(self, chunks: list[ScheduledChunk], num_decodes: int, seconds: float) -> None:
        """Records the duration of a step. `num_decodes`: the number of its chunks that decoded."""
        num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks) - num_decodes
        self.num_decoded_sequences += num_decodes
        self.num_prefill_tokens += num_prompt_tokens
        self._step_budget.note(num_decodes, num_prompt_tokens, seconds)
        if self._takes_turns and num_prompt_tokens == 0:
            self._tenant_share.note(num_decodes, seconds)

    def _take_up_prompts(self, prompts: list[Sequence], chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Divides the step's prompt tokens: a share by arrival, and the rest by the tokens that prompts lack."""
        room = self._step_budget.prompt_tokens(self.num_decodes, self._budget, len(self._num_unfinished))
        if room <= 0:
            return
        if self.num_decodes == 0 and len(prompts) == 1:
            room = self._equal_part(prompts[0], room)
        self._budget = self._by_arrival(sorted(prompts, key=_rank), room, chunks)
        if self._budget > 0 and len(prompts) > 1:
            by_lack = sorted(prompts, key=lambda one: (one.priority, self._num_lacking(one), one.arrival_number))
            self._serve(by_lack, chunks)

    def _equal_part(self, sequence: Sequence, most: int) -> int:
        """Returns the tokens of the next step, up to `most`, for equal steps of the only sequence: each step reads all
        weights, however few tokens the last one has."""
        num_lacking = self._num_lacking(sequence) - (sequence.num_tokens - _end_of_ready(sequence))
        if num_lacking <= most:
            return most
        num_steps = -(-num_lacking // most)
        return -(-num_lacking // num_steps)

    def _with_places(self) -> Iterable[Sequence]:
        """Returns the waiting sequences that can get a place: all if one is free, else those that may preempt."""
        if len(self.running) < self._max_num_seqs:
            return self.waiting
        if not self._takes_turns:
            return ()
        last = max(running.turn for running in self.running)
        return (waiting for waiting in self.waiting if waiting.turn < last)

    def _by_arrival(self, prompts: list[Sequence], room: int, chunks: dict[Sequence, ScheduledChunk]) -> int:
        """Gives prompts their share of `room` in their order. Returns the rest. A span beyond the share reduces later
        shares."""
        if len(prompts) == 1 or self._short_prompt_share == 0:
            self._arrival_credit = room
        else:
            share = room - int(room * self._short_prompt_share)
            self._arrival_credit = min(self._arrival_credit + share, share)
        if self._arrival_credit <= 0:
            return room
        self._budget = limit = min(room, self._arrival_credit)
        self._serve(prompts, chunks)
        self._arrival_credit -= limit - self._budget
        return room - (limit - self._budget)

    def _serve(self, prompts: list[Sequence], chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Schedules the prompts in this order, within the budget."""
        for sequence in prompts:
            if self._budget <= 0:
                return
            if sequence.status is SequenceStatus.WAITING:
                self._start(sequence, chunks)
            elif num_tokens := self._chunk_size(sequence, chunks):
                self._take(sequence, num_tokens, chunks)

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Gives decode chunks their guesses, within the rows, free blocks and free slots. Guesses preempt nothing."""
        room = min(self._max_draft_rows - len(chunks), self._budget)
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if sequence.lookup is None or not chunk.decodes:
                continue
            share = -(-room // (len(chunks) - index))
            most = min(sequence.max_num_tokens - 1, sequence.layout.longest or sequence.max_num_tokens)
            draft = sequence.lookup.guess(min(share, most - chunk.end))
            if draft and self._block_manager.allocate_draft(sequence, chunk.end, len(draft)):
                chunk.draft = draft
                room -= len(draft)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends an unfinished sequence at once and frees its blocks."""
        (self.running if sequence.status is SequenceStatus.RUNNING else self.waiting).remove(sequence)
        self._num_unfinished[sequence.tenant] -= 1
        if not self._num_unfinished[sequence.tenant]:
            del self._num_unfinished[sequence.tenant]
        self._has_changed = True
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _chunk_size(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> int:
        """Returns the number of tokens of the sequence to add to the step, beyond those scheduled already."""
        budget = max(0, self._budget)  # below 0 in a step with a span that is longer than the budget
        if sequence.is_prompt_computed:
            return min(sequence.num_uncomputed_tokens - _num_scheduled(sequence, chunks), budget)
        start, num_ready = sequence.num_computed_tokens + _num_scheduled(sequence, chunks), _end_of_ready(sequence)
        end = sequence.last_whole(min(start + budget, num_ready))
        if end <= start and sequence not in chunks and all(chunk.num_tokens == 1 for chunk in chunks.values()):
            end = sequence.end_of_span(start)
        return max(0, end - start) if end <= num_ready else 0

    def _take(self, sequence: Sequence, num_tokens: int, chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Schedules the next tokens of a running sequence. While blocks are lacking, preempts the running sequence of
        the highest rank, possibly `sequence` itself."""
        in_chunk = _num_scheduled(sequence, chunks) + num_tokens
        while not self._block_manager.allocate(sequence, sequence.num_computed_tokens + in_chunk):
            victim = max(self.running, key=_rank)
            self._preempt(victim, chunks)
            if victim is sequence:
                return
        chunks[sequence] = ScheduledChunk(sequence, in_chunk)
        self._budget -= num_tokens

    def _may_start(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence lacks nothing but room: its first embeddings, its adapter and the prompt
        shared with its parent are ready, and the limit for sequences that wait for embeddings permits it."""
        parent = sequence.parent
        if parent is not None and not (parent.is_prompt_computed or parent.is_finished):
            return False
        if sequence.last_whole(_end_of_ready(sequence)) <= 0 or (sequence.lora and sequence.lora_slot is None):
            return False
        if not sequence.awaits_embeddings:
            return True
        return sum(running.awaits_embeddings for running in self.running) < self._max_num_seqs // 2

    def _start(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Starts a waiting sequence if all its tokens have room, or can take it from a tenant with more running
        sequences. With less room it would soon be preempted again. A preempted sequence keeps its rank, but cannot
        start while a token is pending, because recomputing its last tokens needs their ids."""
        if sequence.num_pending_tokens or not self._may_start(sequence):
            return
        first = next(waiting for waiting in self.waiting if waiting is sequence or self._may_start(waiting))
        has_places = len(self.running) + 2 <= self._max_num_seqs
        is_charged = sequence is not first and not (has_places and self._block_manager.can_start(first))
        if is_charged and not self._may_overtake(sequence, first):
            return
        if not self._make_room(sequence, chunks):
            return
        self._block_manager.take_prefix(sequence)
        num_tokens = self._chunk_size(sequence, chunks)
        if num_tokens == 0:
            self._block_manager.free(sequence)
            return
        self.num_prefix_queries += sequence.num_tokens
        self.num_prefix_hits += sequence.num_computed_tokens
        if is_charged:
            first.num_overtaking_tokens += sequence.num_uncomputed_tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.times.first_scheduled is None:
            sequence.times.first_scheduled = time.perf_counter()
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._take(sequence, num_tokens, chunks)

    def _make_room(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> bool:
        """Returns whether a waiting sequence gets a place and blocks, after preempting sequences with a later turn if
        needed."""
        later = [one for one in self.running if one.priority >= sequence.priority and one.turn > sequence.turn]
        later.sort(key=_rank, reverse=True)
        for count in range(len(later) + 1):
            has_place = len(self.running) - count < self._max_num_seqs
            if has_place and self._block_manager.can_start(sequence, later[:count]):
                for victim in later[:count]:
                    self._preempt(victim, chunks)
                return True
        return False

    def _may_overtake(self, sequence: Sequence, first: Sequence) -> bool:
        """Returns whether `sequence` may take room that `first`, of a lower rank, waits for. The limit keeps a flow of
        small prompts from starving a large one. A preempted sequence that has begun to answer is never overtaken."""
        is_within = first.num_overtaking_tokens + self._num_lacking(sequence) <= first.num_tokens
        return is_within and first.num_tokens == first.num_prompt_tokens

    def _preempt(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Frees a running sequence's blocks and removes it from the step. Computed again, it has the layout for its
        tokens."""
        if sequence in chunks:
            self._budget += chunks.pop(sequence).num_tokens
        self._block_manager.free(sequence)
        if sequence.outgrows_layout:
            sequence.take_next_layout()
        sequence.status = SequenceStatus.WAITING
        sequence.num_overtaking_tokens = 0
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_rank)
        self.num_preemptions += 1

    def _num_lacking(self, sequence: Sequence) -> int:
        """Returns the number of tokens left to compute of a prompt, running or waiting."""
        if sequence.status is SequenceStatus.RUNNING:
            return sequence.num_uncomputed_tokens
        return sequence.num_tokens - self._block_manager.num_cached_tokens(sequence)


_rank = attrgetter("priority", "turn", "arrival_number")
"""The key that orders all sequences: the lowest rank is served first and preempted last."""
_arrival = attrgetter("priority", "arrival_number")


def _num_scheduled(sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> int:
    return chunks[sequence].num_tokens if sequence in chunks else 0


def _end_of_ready(sequence: Sequence) -> int:
    """Returns the position up to which a sequence may be computed now. A few tokens before missing embeddings wait with
    them, because they cost less in the later step than in a step of their own."""
    num_ready = sequence.num_ready_tokens
    is_cut = num_ready < sequence.num_prompt_tokens
    is_short = num_ready - sequence.num_computed_tokens < _MIN_TOKENS_BEFORE_MISSING
    return sequence.num_computed_tokens if is_cut and is_short else num_ready
