"""What is known of an item on its way, from the order to the references to what the stages have made of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from raylens.deployments.request_context import RequestContext
from raylens.preprocess.schema import ItemInfo, StageTime


@dataclass(frozen=True, slots=True)
class ItemOrder:
    """An item that a request needs. `mm_hash` names it in both caches. `model`: whose stages make it, by the suffix of
    their names, see `AppConfig.by_suffix`.

    `content` is None where the item has to be in a cache. It may be a reference to an array of its bytes. `request_id`:
    the pipeline's. `context`: of the client's request. The other fields are those of
    `raylens.deployments.wire.stage_messages.ItemJob`.
    """

    context: RequestContext
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
    """An item that a stage still computes. The objects of the references, to its metadata and to its tensors or
    embeddings, may not exist yet. `ref` is None until a replica of Encode has taken the item."""

    info: ItemInfo | ObjectRef
    ref: ObjectRef | None


@dataclass(slots=True)
class ItemTrace:
    """What happened for one order: the times of the stages that worked for it, the stage that encoded it, and whether
    each cache had the item. An order that joins another's work has only the time of the whole; `made_for` is the id of
    that other request."""

    times: list[StageTime] = field(default_factory=list)
    encoded_by: str | None = None
    was_processed: bool = False
    was_encoded: bool = False
    made_for: str = ""

    @property
    def origin(self) -> str:
        """Returns where the item comes from, in words, or nothing if it was made for this order alone."""
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


OnPending = Callable[[PendingItem], None]
