"""Chooses which sequences run in the next step, and how many tokens of each: continuous batching, chunked prefill."""

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

from llm.block_manager import BlockManager
from llm.sequence import FinishReason, Sequence, SequenceStatus

_MIN_TOKENS_BEFORE_MISSING = 32
"""How many tokens are worth a step before the embeddings behind them have arrived."""


@dataclass(slots=True, init=False, eq=False)
class ScheduledChunk:
    """The next `num_tokens` uncomputed positions of a sequence, [start, end).

    `is_last`: whether the chunk reaches the sequence's last token.
    `samples`: whether a token is sampled behind the chunk: it is the last, and the sequence may grow. A request with
    `max_tokens` 0 only has its prompt computed.
    `draft`: guesses of the tokens behind a decode chunk, which the same step computes.
    """

    sequence: Sequence
    num_tokens: int
    start: int
    end: int
    is_last: bool
    samples: bool
    draft: list[int]

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.start = sequence.num_computed_tokens
        self.end = self.start + num_tokens
        self.is_last = self.end == len(sequence.token_ids)
        self.samples = self.is_last and self.end < sequence.max_num_tokens
        self.draft = []

    @property
    def decodes(self) -> bool:
        """Returns whether the chunk is a generated token, behind which the next one is sampled."""
        return self.samples and self.num_tokens == 1 and self.start >= self.sequence.num_prompt_tokens

    @property
    def scored_tokens(self) -> range:
        """Returns the chunk's tokens, counted from its start, whose logits give the log-probability of the prompt's
        next token."""
        sequence = self.sequence
        if sequence.num_prompt_logprobs is None:
            return range(0)
        last = min(self.end, sequence.num_prompt_tokens - 1)
        return range(max(self.start, sequence.num_scored_tokens) - self.start, last - self.start)


class Scheduler:
    """Divides each step's token budget among sequences.

    Running sequences come first. Among them decoding sequences come before prefilling ones, so that no prompt keeps a
    stream waiting, then a lower `priority` goes first, then the sequence that started first. Waiting sequences follow,
    by priority and then in order of arrival. When blocks run out, the running sequence that is last by priority and
    arrival is preempted and recomputed later.

    A chunk ends before the first position whose embedding has not arrived, and waits with that position where it would
    be very short. It never ends within a bidirectional span. A span that is longer than the budget goes in a step in
    which each other sequence has one token. In that step decoding sequences go on and no other prompt does. Sequences
    that wait for embeddings may start in up to half of the places, so that other sequences get the rest.

    Decoding sequences that have guesses of their next tokens share what is left of `max_draft_rows` rows.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_draft_rows: int = 0
    ) -> None:
        """`max_draft_rows`: tokens of a step that decode, guesses included, up to which sequences get guesses. A step
        of so many takes hardly longer than one of a single token."""
        self._block_manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_draft_rows = min(max_draft_rows, max_num_seqs)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._budget = 0
        self._num_arrived = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.arrival_number = self._num_arrived
        self._num_arrived += 1
        self._wait(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Chooses the next step's chunks, allocates their blocks and returns them, decode chunks (of one token) first.

        The list is empty although sequences are unfinished only where all of them wait for embeddings.
        """
        self._budget = self._max_num_batched_tokens
        chunks: dict[Sequence, ScheduledChunk] = {}
        # Decoding sequences come first: they need one token each, and no stream waits for a prompt.
        for sequence in sorted(self.running, key=_decodes_first):
            if sequence.status is SequenceStatus.RUNNING and (num_tokens := self._chunk_size(sequence, chunks)):
                self._take(sequence, num_tokens, chunks)
        self._start_waiting(chunks)
        if self._max_draft_rows > len(chunks):
            self._add_drafts(list(chunks.values()))
        return list(chunks.values())

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Gives decode chunks their guesses, as far as there are rows and free blocks. Nothing is preempted for
        them."""
        room = min(self._max_draft_rows - len(chunks), self._budget)
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if sequence.lookup is None or not chunk.decodes:
                continue
            share = -(-room // (len(chunks) - index))
            draft = sequence.lookup.guess(min(share, sequence.max_num_tokens - chunk.end - 1))
            if draft and self._block_manager.allocate(sequence, chunk.end + len(draft)):
                chunk.draft = draft
                room -= len(draft)

    def _start_waiting(self, chunks: dict[Sequence, ScheduledChunk]) -> None:
        if not self.waiting:
            return
        num_awaiting = sum(sequence.awaits_embeddings for sequence in self.running)
        for sequence in list(self.waiting):
            if len(self.running) == self._max_num_seqs:
                return
            awaits = sequence.awaits_embeddings
            if not self._may_start(sequence) or (awaits and num_awaiting >= self._max_num_seqs // 2):
                continue
            if not self._start(sequence, chunks):
                return
            num_awaiting += awaits and sequence.status is SequenceStatus.RUNNING

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends an unfinished sequence at once and frees its blocks."""
        (self.running if sequence.status is SequenceStatus.RUNNING else self.waiting).remove(sequence)
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _chunk_size(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> int:
        budget = max(0, self._budget)  # below 0 in a step with a span that is longer than the budget
        if sequence.is_prompt_computed:
            return min(sequence.num_uncomputed_tokens, budget)
        start, num_ready = sequence.num_computed_tokens, _end_of_ready(sequence)
        end = sequence.last_whole(min(start + budget, num_ready))
        if end <= start and all(chunk.num_tokens == 1 for chunk in chunks.values()):
            end = sequence.end_of_span(start)
        return max(0, end - start) if end <= num_ready else 0

    def _take(self, sequence: Sequence, num_tokens: int, chunks: dict[Sequence, ScheduledChunk]) -> None:
        """Schedules the next tokens of a running sequence. While there are too few blocks, this preempts the running
        sequence of the highest rank, which may in the end be `sequence` itself."""
        while not self._block_manager.allocate(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max(self.running, key=lambda running: running.rank)
            if victim in chunks:
                self._budget += chunks.pop(victim).num_tokens
            self._preempt(victim)
            if victim is sequence:
                return
        chunks[sequence] = ScheduledChunk(sequence, num_tokens)
        self._budget -= num_tokens

    def _may_start(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence lacks nothing but room: it waits neither for its first embeddings nor for
        its parent to compute the prompt that they share."""
        parent = sequence.parent
        waits_for_parent = parent is not None and not (parent.is_prompt_computed or parent.is_finished)
        return not waits_for_parent and sequence.last_whole(_end_of_ready(sequence)) > 0

    def _start(self, sequence: Sequence, chunks: dict[Sequence, ScheduledChunk]) -> bool:
        """Starts a waiting sequence if all its tokens have room now. With less room it would soon be preempted again.

        Returns False where the sequences behind it have to wait, too.
        """
        if not self._block_manager.can_start(sequence):
            return False
        self._block_manager.take_prefix(sequence)
        num_tokens = self._chunk_size(sequence, chunks)
        if num_tokens == 0:
            waits_for_embeddings = sequence.last_whole(_end_of_ready(sequence)) <= sequence.num_computed_tokens
            self._block_manager.free(sequence)
            return waits_for_embeddings
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.times.first_scheduled is None:
            sequence.times.first_scheduled = time.perf_counter()
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._take(sequence, num_tokens, chunks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.running.remove(sequence)
        self._wait(sequence)
        self.num_preemptions += 1

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda waiting: waiting.rank)


def _decodes_first(sequence: Sequence) -> tuple[bool, int]:
    return sequence.num_uncomputed_tokens > 1, sequence.priority


def _end_of_ready(sequence: Sequence) -> int:
    """Returns the position up to which a sequence may be computed now. A few tokens in front of embeddings that have
    not arrived wait with them: a step of their own would take longer than they do in the step of the others."""
    num_ready = sequence.num_ready_tokens
    is_cut = num_ready < sequence.num_prompt_tokens
    is_short = num_ready - sequence.num_computed_tokens < _MIN_TOKENS_BEFORE_MISSING
    return sequence.num_computed_tokens if is_cut and is_short else num_ready
