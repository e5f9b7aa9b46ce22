"""Which sequences run in the next step, and how many tokens of each: continuous batching, chunked prefill."""

import time
from collections import deque
from dataclasses import dataclass

from llm.block_manager import BlockManager
from llm.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed positions of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def start(self) -> int:
        return self.sequence.num_computed_tokens

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one can be sampled."""
        return self.end == self.sequence.num_tokens


class Scheduler:
    """One token budget a step. Running sequences come first, in order of arrival (those that decode before those
    that still prefill), then new ones; when blocks run out the youngest running sequence is preempted and
    recomputed later."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._block_manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Picks the next step's chunks and gives them blocks; decode chunks (of one token) come first."""
        chunks: list[ScheduledChunk] = []
        budget = self._max_num_batched_tokens
        # A stable sort: decoding sequences need one token each and nobody waits for a prompt in front of them.
        for sequence in sorted(self.running, key=lambda running: running.num_uncomputed_tokens > 1):
            if sequence.status is not SequenceStatus.RUNNING or budget == 0:
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if self._make_room(sequence, num_tokens, chunks):
                chunks.append(self._take(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._block_manager.can_allocate(sequence, num_tokens):
                break
            self.waiting.popleft()
            self._start(sequence)
            chunks.append(self._take(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def remove_finished(self) -> None:
        """Drops finished sequences and frees their blocks."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.is_finished:
                self._block_manager.free(sequence)
        self.running = [sequence for sequence in self.running if not sequence.is_finished]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_finished)

    def _take(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk:
        chunk = ScheduledChunk(sequence, num_tokens)
        self._block_manager.allocate(sequence, chunk.end)
        return chunk

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        if sequence.times.first_scheduled is None:
            sequence.times.first_scheduled = time.perf_counter()
        self.running.append(sequence)

    def _make_room(self, sequence: Sequence, num_tokens: int, chunks: list[ScheduledChunk]) -> bool:
        """Preempts the youngest running sequences until the chunk fits; False when that ended `sequence` itself."""
        scheduled = {id(chunk.sequence) for chunk in chunks}
        while not self._block_manager.can_allocate(sequence, sequence.num_computed_tokens + num_tokens):
            victim = next(running for running in reversed(self.running) if id(running) not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
