"""What the replicas of the ingress say to a shard of what they share, and what it answers.

An order or a call has a number, by which its answers are known on their connection."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from ray import ObjectRef

from raylens.deployments.item_store.item_states import ItemOrder, MadeItem, PendingItem


@dataclass(frozen=True, slots=True)
class Ask:
    """An order of an item, processed only or with its embeddings."""

    number: int
    is_encoded: bool
    order: ItemOrder


@dataclass(frozen=True, slots=True)
class CallMethod:
    """A call of one of the shard's methods, see `SharedState`."""

    number: int
    method: str
    arguments: list[Any]


@dataclass(frozen=True, slots=True)
class Close:
    """The ingress needs nothing more of an order or a call, and none of the objects that its answers refer to."""

    number: int


@dataclass(frozen=True, slots=True)
class Evict:
    """The embeddings `lost` of an item are gone. See `ItemMaker.evict`."""

    mm_hash: str
    lost: ObjectRef


@dataclass(frozen=True, slots=True)
class Remember:
    """A tenant gave a name to an item's content."""

    tenant: str
    name: str
    hashed_content: str


@dataclass(frozen=True, slots=True)
class Pending:
    """A stage computes the item of an order."""

    number: int
    item: PendingItem


@dataclass(frozen=True, slots=True)
class Result:
    """What an order or a call gives: a MadeItem, or what the method returns."""

    number: int
    value: MadeItem | Any


@dataclass(frozen=True, slots=True)
class Failed:
    """An order or a call ends with an error."""

    number: int
    error: Exception


FromIngress: TypeAlias = Ask | CallMethod | Close | Evict | Remember
FromShard: TypeAlias = Pending | Result | Failed
Message: TypeAlias = FromIngress | FromShard
FROM_INGRESS: tuple[type[Any], ...] = get_args(FromIngress)
FROM_SHARD: tuple[type[Any], ...] = get_args(FromShard)
