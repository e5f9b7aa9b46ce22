"""Which blocks of the KV cache belong to which sequences, and which still hold a prefix that others can take up."""

from collections import Counter, OrderedDict

import numpy as np

from llm.prefix_cache import extend_block_hashes
from llm.sequence import Sequence


class BlockManager:
    """Hands out fixed-size blocks of `block_size` positions and takes them back.

    A full block is known by its content's hash while nothing else has been written to it, also when it is free. Free
    blocks that nobody could find are used first, then those least recently freed.

    Blocks of a sequence follow each other where they can: then its keys and values are one stretch of memory.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._is_blank = np.ones(num_blocks, dtype=bool)
        self._num_blank = num_blocks
        self._cached_block_ids: OrderedDict[int, None] = OrderedDict()
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._num_blank + len(self._cached_block_ids)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the sequence's block table to hold its first `num_tokens` positions. False, with nothing changed,
        when there are too few free blocks."""
        num_missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free_blocks:
            return False
        while num_missing > 0:
            block_ids = self._blank_blocks(sequence, num_missing) if self._num_blank else self._evict(num_missing)
            self._is_blank[block_ids] = False
            self._num_blank -= len(block_ids)
            for block_id in block_ids:
                self._ref_counts[block_id] = 1
            sequence.block_table += block_ids
            num_missing -= len(block_ids)
        return True

    def can_start(self, sequence: Sequence) -> bool:
        """Whether all tokens of a sequence without blocks would fit, counting those of its prefix that are cached."""
        cached = self._cached_prefix(sequence)
        num_revived = sum(1 for block_id in cached if self._ref_counts[block_id] == 0)
        return -(-sequence.num_tokens // self.block_size) - len(cached) <= self.num_free_blocks - num_revived

    def take_prefix(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those that hold its beginning; they count as computed."""
        assert not sequence.block_table
        for block_id in self._cached_prefix(sequence):
            if self._ref_counts[block_id] == 0:
                del self._cached_block_ids[block_id]
            self._ref_counts[block_id] += 1
            sequence.block_table.append(block_id)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size

    def commit(self, sequence: Sequence) -> None:
        """To be called when blocks of the sequence have been filled: they can be found from now on."""
        num_full = sequence.num_computed_tokens // self.block_size
        extend_block_hashes(sequence, self.block_size)
        for index in range(num_full - 1, -1, -1):
            block_id, block_hash = sequence.block_table[index], sequence.block_hashes[index]
            if self._hash_of[block_id] is not None:
                break  # and so have those before it
            self._hash_of[block_id] = block_hash
            self._block_of.setdefault(block_hash, block_id)

    def disown(self, sequence: Sequence) -> None:
        """What the sequence's blocks hold is not to be trusted: nobody finds them any more."""
        for block_id in sequence.block_table:
            self._forget(block_id)

    def free(self, sequence: Sequence) -> None:
        """Takes back all blocks of the sequence; nothing of it counts as computed any more."""
        # From the end: what is freed first is used anew first, and the beginning is what others may share.
        for block_id in reversed(sequence.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._is_findable(block_id):
                    self._cached_block_ids[block_id] = None
                else:
                    self._make_blank(block_id)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises RuntimeError unless every block is either free or held by as many of `sequences` as it says."""
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        counts = [held[block_id] for block_id in range(self.num_blocks)]
        free = sorted([*np.flatnonzero(self._is_blank).tolist(), *self._cached_block_ids])
        unheld = [block_id for block_id, count in enumerate(counts) if count == 0]
        if counts != self._ref_counts or free != unheld or len(free) != self.num_free_blocks:
            raise RuntimeError(f"KV cache blocks lost or doubled: {len(held)} held, {len(free)} free")
        if any(self._hash_of[block_id] != block_hash for block_hash, block_id in self._block_of.items()):
            raise RuntimeError("the prefix cache names blocks that hold something else")

    def _blank_blocks(self, sequence: Sequence, num_wanted: int) -> list[int]:
        """Up to so many blank blocks in a row: behind the sequence's last one, or else where there is most room."""
        start = sequence.block_table[-1] + 1 if sequence.block_table else self.num_blocks
        if start >= self.num_blocks or not self._is_blank[start]:
            start = self._roomiest_start(num_wanted)
        row = self._is_blank[start : start + num_wanted]
        return list(range(start, start + int(np.argmin(row) if not row.all() else len(row))))

    def _roomiest_start(self, num_wanted: int) -> int:
        """In the middle of the longest row of blank blocks: the sequence before it and the new one both can grow."""
        bounds = np.flatnonzero(np.diff(self._is_blank, prepend=False, append=False))
        starts, lengths = bounds[::2], bounds[1::2] - bounds[::2]
        longest = int(lengths.argmax())
        start, room = int(starts[longest]), int(lengths[longest]) - num_wanted
        return start + room // 2 if start > 0 and room > 0 else start

    def _evict(self, num_wanted: int) -> list[int]:
        """The cached blocks that have been free for longest; ascending, as they may follow each other."""
        block_ids = sorted(self._cached_block_ids.popitem(last=False)[0] for _ in range(num_wanted))
        for block_id in block_ids:
            self._make_blank(block_id)
        return block_ids

    def _make_blank(self, block_id: int) -> None:
        self._forget(block_id)
        self._is_blank[block_id] = True
        self._num_blank += 1

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's beginning; at least one token is left to compute, for its logits."""
        if not sequence.reuses_prefix:
            return []
        extend_block_hashes(sequence, self.block_size)
        found = []
        for block_hash in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _is_findable(self, block_id: int) -> bool:
        block_hash = self._hash_of[block_id]
        return block_hash is not None and self._block_of.get(block_hash) == block_id

    def _forget(self, block_id: int) -> None:
        if self._is_findable(block_id):
            block_hash = self._hash_of[block_id]
            assert block_hash is not None
            del self._block_of[block_hash]
        self._hash_of[block_id] = None
