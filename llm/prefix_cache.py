"""Hashes of the content of full KV blocks: equal hashes mean equal keys and values."""

import json
import os
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np

from raylens.llm.lora.request import LoraRequest
from raylens.llm.sequence import PromptItem, Sequence

_DIGEST_BYTES = 16


def shared_root(cache_salt: str, lora: LoraRequest | None = None) -> bytes:
    """Returns the root of block hashes for a salt and an adapter. Requests share blocks if both are equal."""
    root = blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES)
    if lora is None:
        return root.digest()
    identity = json.dumps([lora.name, lora.folder, lora.version]).encode()
    # The personalisation separates these from the roots of all salts without an adapter.
    return blake2b(root.digest() + identity, digest_size=_DIGEST_BYTES, person=b"lora").digest()


def private_root() -> bytes:
    """Returns a random root of block hashes, for a request that shares blocks only among its own answers."""
    return os.urandom(_DIGEST_BYTES)


def extend_block_hashes(sequence: Sequence, block_size: int) -> None:
    """Extends `sequence.block_hashes` to all blocks that the sequence's known tokens fill.

    A block's hash covers the hash of the previous block (`sequence.prefix_root` for the first), its token ids, and
    start and content hash of each of its items. Blocks of equal ids thus have different hashes if their pictures or
    tenants differ. The hash is cryptographic, because a client could search for collisions.
    """
    for index in range(len(sequence.block_hashes), len(sequence.token_ids) // block_size):
        parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.prefix_root
        start, end = index * block_size, (index + 1) * block_size
        content = np.array(sequence.token_ids[start:end], dtype=np.int64).tobytes()
        hasher = blake2b(parent + content, digest_size=_DIGEST_BYTES)
        for name in _items_between(sequence.items, start, end):
            hasher.update(name)
        sequence.block_hashes.append(hasher.digest())


def _items_between(items: Seq[PromptItem], start: int, end: int) -> list[bytes]:
    """Returns start and content hash of every item that reaches into [start, end)."""
    return [
        f"{item.positions[0] - start}:{item.mm_hash};".encode()
        for item in items
        if item.positions and item.positions[0] < end and item.positions[-1] >= start
    ]
