"""What the ingress holds of an item, from its content to the references to what the stages have made of it."""

from dataclasses import dataclass

from ray import ObjectRef

from deployments.pipeline.media_source import MediaSource
from preprocess.schema import ItemInfo


@dataclass(frozen=True, slots=True)
class LoadedItem:
    """An item, the hash that names it in both caches, and its work in pixels. `content` is None where the client only
    named the item: then it must be in a cache."""

    source: MediaSource
    content: bytes | None
    num_pixels: int
    hashed_content: str
    mm_hash: str


@dataclass(frozen=True, slots=True)
class StoredItem:
    """What both caches hold: an item's metadata and the reference to its tensors or its embeddings."""

    info: ItemInfo
    ref: ObjectRef


@dataclass(frozen=True, slots=True)
class PendingItem:
    """An item in the making. There may be nothing yet behind the references to its metadata, and to its tensors or its
    embeddings. `ref` is None until a replica of Encode has taken the item."""

    info: ItemInfo | ObjectRef
    ref: ObjectRef | None
