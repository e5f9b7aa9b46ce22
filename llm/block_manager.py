"""Which blocks of the KV cache belong to which sequence."""

from llm.sequence import Sequence


class BlockManager:
    """Hands out fixed-size blocks of `block_size` positions and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free_block_ids = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_block_ids)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence's first `num_tokens` positions have blocks or can get them."""
        return self.num_blocks_for(num_tokens) - len(sequence.block_table) <= self.num_free_blocks

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Extends the sequence's block table to hold its first `num_tokens` positions."""
        while len(sequence.block_table) < self.num_blocks_for(num_tokens):
            sequence.block_table.append(self._free_block_ids.pop())

    def free(self, sequence: Sequence) -> None:
        """Takes back all blocks of the sequence; nothing of it counts as computed any more."""
        self._free_block_ids.extend(reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises RuntimeError unless every block is either free or in exactly one of `sequences`."""
        held = [block_id for sequence in sequences for block_id in sequence.block_table]
        if sorted(held + self._free_block_ids) != list(range(self.num_blocks)):
            raise RuntimeError(f"KV cache blocks lost or doubled: {len(held)} held, {self.num_free_blocks} free")
