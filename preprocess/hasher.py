"""Content hashes of media items: the keys of the processor cache and the embedding cache."""

import hashlib


def mm_hash(content: bytes, *, modality: str, processor_fingerprint: str, tenant_salt: str = "") -> str:
    """SHA-256 (64 hex digits) over an item's *encoded* bytes and everything else that changes its result.

    Hashing the encoded bytes answers a repeated item without decoding it, and two pictures that decode to the
    same pixels but differ in mode, palette or EXIF orientation keep apart. Each part is length-prefixed, so that
    no two lists of parts run together to the same bytes.
    """
    digest = hashlib.sha256()
    for part in (modality.encode(), processor_fingerprint.encode(), tenant_salt.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
