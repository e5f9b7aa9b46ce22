"""Assigns blocks of the KV cache to sequences and finds blocks that hold a reusable prefix by hashes of their content:
equal hashes mean equal keys and values."""

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np

from raylens.llm.lora.request import LoraRequest
from raylens.llm.sequence import PromptItem, Sequence
from raylens.llm.states.cross_source import CrossBlocks, CrossSource
from raylens.llm.states.state_slots import StateSlots

_DIGEST_BYTES = 16


class BlockManager:
    """Allocates and frees blocks of `block_size` positions.

    A full block is findable by the hash of its content until it is overwritten. A free findable block is called cached;
    all other free blocks are blank. Allocation takes blank blocks first, then the least recently freed cached blocks. A
    sequence gets consecutive blocks where possible, so that its keys and values are contiguous in memory."""

    def __init__(
        self, num_blocks: int, block_size: int, states: StateSlots | None = None, cross: CrossBlocks | None = None
    ) -> None:
        """`states`: the slots of a model with recurrent states. A cached prefix then ends at a snapshot. `cross`: the
        blocks of a model with cross states."""
        self._states = states
        self._cross = cross
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
        """Returns the share of the blocks that are in use, 0 to 1."""
        used = 1 - self.num_free_blocks / self.num_blocks
        return used if self._cross is None else max(used, self._cross.usage)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the block table to the first `num_tokens` positions, or returns False if too few blocks are free."""
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

    def allocate_draft(self, sequence: Sequence, end: int, num_guesses: int) -> bool:
        """Gives the guesses from position `end` on their blocks and state slots, until `end_draft`. Returns False if
        too few are free."""
        if not self.allocate(sequence, end + num_guesses):
            return False
        return self._states is None or self._states.take_draft(sequence, num_guesses)

    def can_start(self, sequence: Sequence, without: Seq[Sequence] = ()) -> bool:
        """Returns whether all tokens of a sequence without blocks fit, once the sequences `without` have given up their
        blocks. Blocks of its cached prefix are reused."""
        if self._cross is not None and not self._cross.have_room(sequence, without):
            return False
        cached = self._cached_prefix(sequence)
        num_revived = sum(1 for block_id in cached if self._ref_counts[block_id] == 0)
        num_free = self.num_free_blocks - num_revived
        if without:
            given_up = Counter(block_id for one in without for block_id in one.block_table if block_id not in cached)
            num_free += sum(self._ref_counts[block_id] == count for block_id, count in given_up.items())
        return -(-sequence.num_tokens // self.block_size) - len(cached) <= num_free

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Returns the tokens of a waiting sequence's cached prefix. Later calls check only the end of the prefix found
        before, because prefixes grow and shrink there."""
        if not sequence.reuses_prefix:
            return 0
        if self._states is not None:
            return len(self._cached_prefix(sequence)) * self.block_size
        extend_block_hashes(sequence, self.block_size)
        hashes, found = sequence.block_hashes, sequence.num_found_blocks
        while found > 0 and hashes[found - 1] not in self._block_of:
            found -= 1
        while found < (sequence.num_tokens - 1) // self.block_size and hashes[found] in self._block_of:
            found += 1
        sequence.num_found_blocks = found
        return found * self.block_size

    def take_prefix(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks the blocks of its cached prefix. Their tokens count as computed."""
        assert not sequence.block_table
        for block_id in self._cached_prefix(sequence):
            if self._ref_counts[block_id] == 0:
                del self._cached_block_ids[block_id]
            self._ref_counts[block_id] += 1
            sequence.block_table.append(block_id)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        if self._states is not None:
            self._states.take(sequence, sequence.block_hashes[: len(sequence.block_table)])
        if self._cross is not None:
            self._cross.take(sequence)

    def plan_snapshot(self, sequence: Sequence, start: int, end: int) -> tuple[int, int] | None:
        """Returns the end in tokens and the slot of the snapshot of the state that the chunk [start, end) leaves, or
        None. Later calls for the sequence make it findable."""
        return None if self._states is None else self._states.plan(sequence, start, end)

    def note_computed(self, sequence: Sequence, end: int) -> None:
        """Notes that the cache holds the sequence up to `end`, and makes newly filled blocks findable."""
        num_full = sequence.num_nameable_tokens // self.block_size
        sequence.num_computed_tokens = end
        sequence.state_source = sequence.state_slot
        sequence.has_cross_states = True
        if sequence.num_nameable_tokens // self.block_size > num_full:
            self.commit(sequence)

    def note_accepted(self, sequence: Sequence, end: int) -> None:
        """Notes that the next guess, which ends at `end`, is right."""
        if self._states is not None:
            self._states.accept(sequence)
        self.note_computed(sequence, end)

    def end_draft(self, sequence: Sequence) -> None:
        """Notes that the guesses left are wrong."""
        if self._states is not None:
            self._states.end_draft(sequence)

    def note_known(self, sequence: Sequence) -> None:
        """Notes that the host knows another token, and makes a block that is now full findable."""
        if sequence.num_nameable_tokens % self.block_size == 0:
            self.commit(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks of known tokens findable."""
        num_full = sequence.num_nameable_tokens // self.block_size
        extend_block_hashes(sequence, self.block_size)
        for index in range(num_full - 1, -1, -1):
            block_id, block_hash = sequence.block_table[index], sequence.block_hashes[index]
            if self._hash_of[block_id] is not None:
                break  # the blocks before this one have their hashes, too
            self._hash_of[block_id] = block_hash
            self._block_of.setdefault(block_hash, block_id)
        if self._states is not None:
            self._states.settle(sequence)

    def disown(self, sequence: Sequence) -> None:
        """Makes the sequence's blocks unfindable, because their content may be wrong."""
        for block_id in sequence.block_table:
            self._forget(block_id)

    def free(self, sequence: Sequence) -> None:
        """Frees all blocks of the sequence and marks all its tokens as not computed."""
        # In reverse: blocks freed first are reused first, and other sequences are more likely to share the beginning.
        for block_id in reversed(sequence.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._is_findable(block_id):
                    self._cached_block_ids[block_id] = None
                else:
                    self._make_blank(block_id)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0
        if self._states is not None:
            self._states.give_back(sequence)
        if self._cross is not None:
            self._cross.give_back(sequence)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises RuntimeError unless the reference counts match `sequences`, all other blocks are free, and each entry
        of the prefix cache names a block with its hash."""
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        counts = [held[block_id] for block_id in range(self.num_blocks)]
        free = sorted([*np.flatnonzero(self._is_blank).tolist(), *self._cached_block_ids])
        unheld = [block_id for block_id, count in enumerate(counts) if count == 0]
        if counts != self._ref_counts or free != unheld or len(free) != self.num_free_blocks:
            raise RuntimeError(f"KV cache blocks lost or doubled: {len(held)} held, {len(free)} free")
        if any(self._hash_of[block_id] != block_hash for block_hash, block_id in self._block_of.items()):
            raise RuntimeError("the prefix cache names blocks that hold something else")
        if self._states is not None:
            self._states.check_integrity(sequences)
        if self._cross is not None:
            self._cross.check_integrity(sequences)

    def _blank_blocks(self, sequence: Sequence, num_wanted: int) -> list[int]:
        """Returns consecutive blank blocks: after the sequence's last block, or else in the longest run."""
        start = sequence.block_table[-1] + 1 if sequence.block_table else self.num_blocks
        if start >= self.num_blocks or not self._is_blank[start]:
            start = self._roomiest_start(num_wanted)
        row = self._is_blank[start : start + num_wanted]
        return list(range(start, start + int(np.argmin(row) if not row.all() else len(row))))

    def _roomiest_start(self, num_wanted: int) -> int:
        """Returns the first block to take from the longest run of blank blocks: in its middle, so that both the
        sequence before the run and the new one can grow, but first in a run at the start of the cache."""
        bounds = np.flatnonzero(np.diff(self._is_blank, prepend=False, append=False))
        starts, lengths = bounds[::2], bounds[1::2] - bounds[::2]
        longest = int(lengths.argmax())
        start, room = int(starts[longest]), int(lengths[longest]) - num_wanted
        return start + room // 2 if start > 0 and room > 0 else start

    def _evict(self, num_wanted: int) -> list[int]:
        """Evicts the least recently freed cached blocks. Returns them in ascending order, so that neighbours stay
        so."""
        block_ids = sorted(self._cached_block_ids.popitem(last=False)[0] for _ in range(num_wanted))
        for block_id in block_ids:
            self._make_blank(block_id)
        return block_ids

    def _make_blank(self, block_id: int) -> None:
        self._forget(block_id)
        self._is_blank[block_id] = True
        self._num_blank += 1

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the cached prefix. It ends before the last token, whose logits are needed."""
        if not sequence.reuses_prefix:
            return []
        extend_block_hashes(sequence, self.block_size)
        found = []
        for block_hash in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found if self._states is None else found[: self._states.num_usable(sequence.block_hashes[: len(found)])]

    def _is_findable(self, block_id: int) -> bool:
        block_hash = self._hash_of[block_id]
        return block_hash is not None and self._block_of.get(block_hash) == block_id

    def _forget(self, block_id: int) -> None:
        block_hash, self._hash_of[block_id] = self._hash_of[block_id], None
        if block_hash is not None and self._block_of.get(block_hash) == block_id:
            del self._block_of[block_hash]


def shared_root(cache_salt: str, prompt_salt: str = "", lora: LoraRequest | None = None) -> bytes:
    """Returns the root of block hashes for two salts and an adapter. Requests share blocks if all are equal."""
    root = blake2b(json.dumps([cache_salt, prompt_salt]).encode(), digest_size=_DIGEST_BYTES)
    if lora is None:
        return root.digest()
    identity = json.dumps([lora.name, lora.folder, lora.version]).encode()
    # The personalisation separates these from the roots of all salts without an adapter.
    return blake2b(root.digest() + identity, digest_size=_DIGEST_BYTES, person=b"lora").digest()


def private_root() -> bytes:
    """Returns a random root of block hashes, for a request that shares blocks only among its own answers."""
    return os.urandom(_DIGEST_BYTES)


def states_root(root: bytes, source: CrossSource, items: Seq[PromptItem]) -> bytes:
    """Returns the root of block hashes of a sequence with cross states, on which each of its positions may depend."""
    content = json.dumps([list(source.token_ids), [[item.mm_hash, item.positions[0]] for item in items]]).encode()
    return blake2b(root + content, digest_size=_DIGEST_BYTES, person=b"states").digest()


def extend_block_hashes(sequence: Sequence, block_size: int) -> None:
    """Extends `sequence.block_hashes` to all blocks that the sequence's known tokens fill.

    A block's hash covers the hash of the previous block (`sequence.prefix_root` and the layout's `cache_name` for the
    first), its token ids, and start and content hash of each of its items. Blocks of equal ids thus have different
    hashes if their pictures or tenants differ. The hash is cryptographic, because a client could search for
    collisions."""
    for index in range(len(sequence.block_hashes), len(sequence.token_ids) // block_size):
        root = sequence.prefix_root + sequence.layout.cache_name
        parent = sequence.block_hashes[-1] if sequence.block_hashes else root
        start, end = index * block_size, (index + 1) * block_size
        content = np.array(sequence.token_ids[start:end], dtype=np.int64).tobytes()
        hasher = blake2b(parent + content, digest_size=_DIGEST_BYTES)
        for item in sequence.items:
            if item.positions and item.positions[0] < end and item.positions[-1] >= start:
                hasher.update(f"{item.positions[0] - start}:{item.mm_hash};".encode())
        sequence.block_hashes.append(hasher.digest())
