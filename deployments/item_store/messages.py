"""Messages between an ingress replica and a shard of the shared state.

Each order or call has a number, which identifies its answers on the connection."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from raylens.deployments.item_store.item_states import ItemOrder, ItemTrace, SharedItem
from raylens.deployments.ray_internals.references import PackedReference


@dataclass(frozen=True, slots=True)
class Ask:
    """An order of an item. `is_encoded`: with embeddings, else processed only."""

    number: int
    is_encoded: bool
    order: ItemOrder


@dataclass(frozen=True, slots=True)
class CallMethod:
    """A call of one of the shard's `SharedState.methods`."""

    number: int
    method: str
    arguments: list[Any]


@dataclass(frozen=True, slots=True)
class Close:
    """Closes an order or call: the ingress no longer needs its answers' referenced data."""

    number: int


@dataclass(frozen=True, slots=True)
class Evict:
    """The embeddings `lost` of an item are gone. See `ItemMaker.evict`."""

    mm_hash: str
    lost: PackedReference


@dataclass(frozen=True, slots=True)
class Remember:
    """A tenant gave a name to an item's content."""

    tenant: str
    name: str
    hashed_content: str


@dataclass(frozen=True, slots=True)
class Pending:
    """An ordered item whose embeddings are pending."""

    number: int
    item: SharedItem


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an order. `item`: None for the item of the last Pending."""

    number: int
    item: SharedItem | None
    trace: ItemTrace


@dataclass(frozen=True, slots=True)
class Result:
    """The return value of a call."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    number: int
    error: Exception


FromIngress: TypeAlias = Ask | CallMethod | Close | Evict | Remember
FromShard: TypeAlias = Pending | Made | Result | Failed
Message: TypeAlias = FromIngress | FromShard
FROM_INGRESS: tuple[type[Any], ...] = get_args(FromIngress)
FROM_SHARD: tuple[type[Any], ...] = get_args(FromShard)
