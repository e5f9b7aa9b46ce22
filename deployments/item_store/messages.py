"""What the replicas of the ingress say to a shard of what they share, and what it answers.

An order or a call has a number, by which its answers are known on their connection."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from ray import ObjectRef

from raylens.deployments.item_store.item_states import ItemOrder, MadeItem, PendingItem
from raylens.deployments.item_store.weight import Weight


@dataclass(frozen=True, slots=True)
class Ask:
    """An order of an item, processed only or with its embeddings."""

    number: int
    is_encoded: bool
    order: ItemOrder


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the shard's methods, see `SharedState`."""

    number: int
    method: str
    arguments: list[Any]


@dataclass(frozen=True, slots=True)
class Close:
    """The ingress needs nothing more of an order or a call, and none of the objects that its answers refer to."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The embeddings `lost` of an item are gone. See `ItemMaker.forget`."""

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
    """The item of an order is in the making."""

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


@dataclass(frozen=True, slots=True)
class Restate:
    """An ingress tells a new ledger what it has of a budget."""

    budget: str
    limit: Weight
    held: Weight


@dataclass(frozen=True, slots=True)
class Need:
    """How large an ingress' lease of a budget has to be for a wish. The budget is `limit` as a whole."""

    budget: str
    limit: Weight
    lease: Weight


@dataclass(frozen=True, slots=True)
class Lack:
    """An ingress needs these leases for its wish `number`. See `Ledger.lack`."""

    number: int
    needs: list[Need]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """An ingress gives back what it does not use of a budget."""

    budget: str
    amounts: Weight


@dataclass(frozen=True, slots=True)
class Grant:
    """An ingress gets more of some budgets, by their names, for its wish `number`."""

    number: int
    amounts: dict[str, Weight]


@dataclass(frozen=True, slots=True)
class Recall:
    """From now on another ingress lacks what this one does not use, or no longer does."""

    budget: str
    is_wanted: bool


FromIngress: TypeAlias = Ask | Call | Close | Forget | Remember | Restate | Lack | GiveBack
FromShard: TypeAlias = Pending | Result | Failed | Grant | Recall
Message: TypeAlias = FromIngress | FromShard
FROM_INGRESS: tuple[type[Any], ...] = get_args(FromIngress)
FROM_SHARD: tuple[type[Any], ...] = get_args(FromShard)
