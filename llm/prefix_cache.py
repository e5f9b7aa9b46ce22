"""Names for the content of full KV blocks: equal names mean equal keys and values."""

import os
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np

from llm.sequence import PromptItem, Sequence

_DIGEST_BYTES = 16


def shared_root(cache_salt: str) -> bytes:
    """What the hashes of all requests of one salt begin with."""
    return blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()


def private_root() -> bytes:
    """What the hashes of one request begin with that shares only among its own answers."""
    return os.urandom(_DIGEST_BYTES)


def extend_block_hashes(sequence: Sequence, block_size: int) -> None:
    """Brings `sequence.block_hashes` up to all blocks that its tokens fill.

    A block's hash covers the hash of the block before it (the first one's: `sequence.prefix_root`), its token ids, and
    of each item in it the content's hash and where the item starts. So equal ids with different pictures in them, or of
    another tenant, differ; a cryptographic hash, for a client could look for collisions.
    """
    for index in range(len(sequence.block_hashes), sequence.num_tokens // block_size):
        parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.prefix_root
        start, end = index * block_size, (index + 1) * block_size
        content = np.array(sequence.token_ids[start:end], dtype=np.int64).tobytes()
        hasher = blake2b(parent + content, digest_size=_DIGEST_BYTES)
        for name in _items_between(sequence.items, start, end):
            hasher.update(name)
        sequence.block_hashes.append(hasher.digest())


def _items_between(items: Seq[PromptItem], start: int, end: int) -> list[bytes]:
    """Of every item with an embedding in or on both sides of [start, end)."""
    return [
        f"{item.positions[0] - start}:{item.mm_hash};".encode()
        for item in items
        if item.positions and item.positions[0] < end and item.positions[-1] >= start
    ]
