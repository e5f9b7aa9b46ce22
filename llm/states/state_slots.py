"""Assigns slots of recurrent states to running sequences, and to snapshots that later sequences may continue from."""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

from raylens.llm.sequence import Sequence

_SNAPSHOT_TOKENS = 64
"""An answer leaves a snapshot at most so many tokens before its end, for the next turn of its conversation."""


class StateSlots:
    """A running sequence has a slot of its own. During a step each of its guesses has another slot. That of the last
    right guess then becomes the sequence's.

    A snapshot is a copy of a state at the end of a full block, found by the block's hash. Prompts leave one at their
    last full block, answers a later one. The least recently used snapshots go first."""

    def __init__(self, num_running: int, num_snapshots: int, block_size: int) -> None:
        self._block_size = block_size
        self._interval = -(-_SNAPSHOT_TOKENS // block_size) * block_size
        self._num_running, self._num_snapshots = num_running, num_snapshots
        self._free = list(range(num_running))  # a heap: low slots stay side by side
        self._blank = list(range(num_running, num_running + num_snapshots))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._planned: dict[Sequence, tuple[int, int]] = {}  # the end in tokens, and the slot

    def num_usable(self, block_hashes: Seq[bytes]) -> int:
        """Returns the number of first blocks up to the last one with a snapshot."""
        return next((end for end in range(len(block_hashes), 0, -1) if block_hashes[end - 1] in self._snapshots), 0)

    def take(self, sequence: Sequence, prefix: Seq[bytes]) -> None:
        """Gives a sequence a slot. It continues from the snapshot of the last block of `prefix`, if there is any."""
        sequence.state_slot = heappop(self._free)
        sequence.state_source = None
        if prefix:
            self._snapshots.move_to_end(prefix[-1])
            sequence.state_source = self._snapshots[prefix[-1]]

    def give_back(self, sequence: Sequence) -> None:
        if sequence.state_slot is None:
            return
        heappush(self._free, sequence.state_slot)
        sequence.state_slot = sequence.state_source = None
        self.end_draft(sequence)
        self._drop_plan(sequence)

    def take_draft(self, sequence: Sequence, num_guesses: int) -> bool:
        """Gives each guess a slot, or returns False if too few are free."""
        if num_guesses > len(self._free):
            return False
        sequence.draft_slots = [heappop(self._free) for _ in range(num_guesses)]
        return True

    def accept(self, sequence: Sequence) -> None:
        """Makes the state after the next guess the sequence's."""
        assert sequence.state_slot is not None, "a sequence with guesses runs"
        heappush(self._free, sequence.state_slot)
        sequence.state_slot = sequence.draft_slots.pop(0)

    def end_draft(self, sequence: Sequence) -> None:
        for slot in sequence.draft_slots:
            heappush(self._free, slot)
        sequence.draft_slots.clear()

    def plan(self, sequence: Sequence, start: int, end: int) -> tuple[int, int] | None:
        """Returns the end in tokens of a snapshot that the chunk [start, end) leaves, and its slot, or None."""
        at = self._position(sequence, start, end)
        if at is None:
            return None
        self._drop_plan(sequence)
        if not self._blank:
            if not self._snapshots:
                return None
            self._blank.append(self._snapshots.popitem(last=False)[1])
        self._planned[sequence] = at, self._blank.pop()
        return self._planned[sequence]

    def settle(self, sequence: Sequence) -> None:
        """Makes a planned snapshot findable, if it is computed and the hash of its last block is known."""
        at, slot = self._planned.get(sequence, (0, 0))
        if not 0 < at <= sequence.num_nameable_tokens:
            return
        del self._planned[sequence]
        block_hash = sequence.block_hashes[at // self._block_size - 1]
        if block_hash in self._snapshots:
            self._blank.append(slot)
        else:
            self._snapshots[block_hash] = slot

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        """Raises RuntimeError unless each slot belongs to one of `sequences` or to a snapshot, or is free."""
        held = [one.state_slot for one in sequences if one.state_slot is not None]
        held += [slot for one in sequences for slot in one.draft_slots]
        num_copies = len(self._snapshots) + len(self._planned) + len(self._blank)
        if sorted([*held, *self._free]) != list(range(self._num_running)) or num_copies != self._num_snapshots:
            raise RuntimeError(f"state slots lost or doubled: {len(held)} held, {len(self._free)} free")

    def _position(self, sequence: Sequence, start: int, end: int) -> int | None:
        of_prompt = (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size
        of_answer = end // self._interval * self._interval
        at = of_answer if of_answer > sequence.num_prompt_tokens else of_prompt
        return at if start < at <= end else None

    def _drop_plan(self, sequence: Sequence) -> None:
        if sequence in self._planned:
            self._blank.append(self._planned.pop(sequence)[1])
