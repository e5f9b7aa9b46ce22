"""Content hashes of media items: the keys of the processor cache and the embedding cache."""

import hashlib
import json
from collections.abc import Mapping

from blake3 import blake3


def content_hash(content: bytes) -> str:
    """Returns the BLAKE3 hash (64 hex digits) of an item's *encoded* bytes. BLAKE3 is four times as fast as SHA-256.

    Because encoded bytes are hashed, a repeated item is found without decoding it. Two pictures that decode to the same
    pixels but differ in mode, palette or EXIF orientation get different hashes.
    """
    return blake3(content).hexdigest()


def mm_hash(
    hashed_content: str,
    *,
    modality: str,
    model: str = "",
    processor_fingerprint: str,
    options: Mapping[str, object] | None = None,
    is_among_others: bool = False,
    is_precomputed: bool = False,
    cache_salt: str = "",
) -> str:
    """Returns the SHA-256 hash (64 hex digits) of an item's content hash and all else that changes the item's result.

    `model` tells one model of an endpoint from another: with the same processor, two may encode an item otherwise.
    `options` are the client's settings for the processor. `is_among_others` tells that the prompt holds more items of
    the modality, for models to which that matters. `is_precomputed` tells that the content is tensors. Tenants with
    different salts never share an item. Each part is length-prefixed, so that two different lists of parts never give
    the same bytes.
    """
    settings = json.dumps([dict(options or {}), is_among_others, is_precomputed], sort_keys=True)
    digest = hashlib.sha256()
    for part in (modality, model, processor_fingerprint, settings, cache_salt, hashed_content):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
