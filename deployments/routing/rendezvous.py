"""Rendezvous hashing: every process ranks replicas or shards alike for a key, without talking to another process. When
one comes or goes, only its own keys move."""

from collections.abc import Iterable
from hashlib import blake2b


def rank(key: str, ids: Iterable[str]) -> list[str]:
    """Returns the ids in the key's order of preference."""
    return sorted(ids, key=lambda one: (_weight(key, one), one), reverse=True)


def _weight(key: str, one: str) -> bytes:
    # A key may come from a client's JSON, where half a surrogate pair is legal.
    text = f"{one}\0{key}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()
