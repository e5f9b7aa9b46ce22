"""Rendezvous hashing: all processes rank replicas or shards identically for a key, without communication. If one is
added or removed, only its own keys move."""

from collections.abc import Iterable
from hashlib import blake2b


def rank(key: str, ids: Iterable[str]) -> list[str]:
    """Returns the ids in the key's order of preference."""
    return sorted(ids, key=lambda one: (_weight(key, one), one), reverse=True)


def _weight(key: str, one: str) -> bytes:
    # A key may come from a client's JSON, which allows half a surrogate pair.
    text = f"{one}\0{key}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()
