"""The states of an item, from the order to the references to the stages' results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import RequestContext
from raylens.preprocess.schema import ItemInfo, StageTime


@dataclass(frozen=True, slots=True)
class ItemOrder:
    """An item that a request needs. `mm_hash`: its key in both caches. `model`: its stages, by their name suffix, see
    `AppConfig.by_suffix`.

    `content`: bytes, a reference to an array of bytes, or None to require a cached item. `request_id`: the pipeline's.
    `context`: the client request's. The other fields are those of `raylens.deployments.wire.stage_messages.ItemJob`."""

    context: RequestContext
    request_id: str
    model: str
    mm_hash: str
    modality: str
    content: bytes | PackedReference | None
    num_pixels: int
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool


class ContentMissingError(Exception):
    """An item must be computed, but its order has no content."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item's metadata, and the reference to its tensors or embeddings, which may be pending except in a cache."""

    info: ItemInfo
    ref: ObjectRef

    @property
    def shared(self) -> "SharedItem":
        return SharedItem(self.info, PackedReference.of(self.ref))


@dataclass(frozen=True, slots=True)
class SharedItem:
    """A StoredItem as its shard describes it to an ingress, which passes the reference on."""

    info: ItemInfo
    ref: PackedReference


@dataclass(slots=True)
class ItemTrace:
    """The history of one order: its stage times, the stage that encoded the item, and whether each cache had the item.
    An order that joined another order's work has only the total time; `made_for` is the id of that other request."""

    times: list[StageTime] = field(default_factory=list)
    encoded_by: str | None = None
    was_processed: bool = False
    was_encoded: bool = False
    made_for: str = ""

    @property
    def origin(self) -> str:
        """Returns the item's origin in words, empty if it was computed for this order alone."""
        if self.was_encoded:
            return "embeddings cached"
        if self.made_for:
            return f"made for request {self.made_for}"
        return "processed before" if self.was_processed else ""


@dataclass(frozen=True, slots=True)
class MadeItem:
    """The answer to an order."""

    stored: StoredItem
    trace: ItemTrace


OnPending = Callable[[StoredItem], None]
"""Gets an item that is processed and taken by an Encode replica; again if another replica takes it."""
ITEM_STATES = (ItemOrder, SharedItem, ItemTrace)
