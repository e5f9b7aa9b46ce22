"""What is known of an item on its way, from the order to the references to what the stages have made of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from preprocess.schema import ItemInfo


@dataclass(frozen=True, slots=True)
class ItemOrder:
    """An item that a request needs. `mm_hash` names it in both caches. `model`: whose stages make it, by the suffix of
    their names, see `AppConfig.by_suffix`.

    `content` is None where the item has to be in a cache. It may be a reference to an array of its bytes. The other
    fields are those of `deployments.stages.stage_messages.ItemJob`.
    """

    request_id: str
    model: str
    mm_hash: str
    modality: str
    content: bytes | ObjectRef | None
    num_pixels: int
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool


class ContentMissingError(Exception):
    """An item has to be made, and its order has no content."""


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


@dataclass(slots=True)
class ItemTrace:
    """What happened for one order: the seconds that each stage took for it, the stage that encoded it, and whether each
    cache had the item. An order that joins another's work has no times."""

    stage_seconds: dict[str, float] = field(default_factory=dict)
    encoded_by: str | None = None
    was_processed: bool = False
    was_encoded: bool = False


@dataclass(frozen=True, slots=True)
class MadeItem:
    """The answer to an order."""

    stored: StoredItem
    trace: ItemTrace


OnPending = Callable[[PendingItem], None]
