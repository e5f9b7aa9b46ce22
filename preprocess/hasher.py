"""Content hashes of media items: the keys of the processor cache and the embedding cache."""

import hashlib
import json
from collections.abc import Mapping

from blake3 import blake3


def content_hash(content: bytes) -> str:
    """Returns the BLAKE3 hash (64 hex digits) of an item's *encoded* bytes. BLAKE3 is four times as fast as SHA-256.

    Hashing the encoded bytes finds a repeated item without decoding it. Pictures that decode to the same pixels but
    differ in mode, palette or EXIF orientation get different hashes."""
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

    `model`: distinguishes the models of an endpoint, which may encode an item differently with the same processor.
    `options`: the client's settings for the processor. `is_among_others`: the prompt holds more items of the modality,
    and this matters to the model. `is_precomputed`: the content is tensors. `cache_salt`: of the tenant; tenants with
    different salts never share an item. Each part is length-prefixed, so that different lists of parts never give the
    same bytes."""
    settings = json.dumps([dict(options or {}), is_among_others, is_precomputed], sort_keys=True)
    digest = hashlib.sha256()
    for part in (modality, model, processor_fingerprint, settings, cache_salt, hashed_content):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
