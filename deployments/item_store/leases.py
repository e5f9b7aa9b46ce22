"""What this ingress has of the budgets that all ingresses share, and how it asks for more.

The ledger (`deployments/item_store/ledger.py`) lends. An ingress that loses it goes on with what it has."""

import itertools
from collections.abc import Callable, Hashable, Sequence

from raylens.deployments.item_store.messages import GiveBack, Grant, Lack, Need, Recall, Restate
from raylens.deployments.item_store.weight import Weight

Send = Callable[[Lack | GiveBack | Restate], None]


class Lease:
    """This ingress' part of one budget. `limit`: the whole budget; `used`: what the requests of this ingress have
    taken of it."""

    def __init__(self, name: str, limit: Weight) -> None:
        self.name = name
        self.limit = limit
        self.used = Weight()
        self.held = Weight()
        self.is_recalled = False

    def missing_for(self, weight: Weight) -> Weight:
        """Returns what the lease is short of to take `weight`. Of what is not asked for (0) nothing is missing."""
        return (self.used + weight).where(weight).excess_over(self.held)

    @property
    def has_place(self) -> bool:
        """Returns whether one more request may start, whatever else it takes."""
        return self.used.requests < self.held.requests

    def may_come(self, weight: Weight) -> bool:
        """Returns whether others may have room for `weight`: what they use is not known here."""
        return (self.used + weight).where(weight).exceeded_resource(self.limit) is None

    @property
    def can_grow(self) -> bool:
        """Returns whether there is more of the budget than this ingress has."""
        return self.limit.exceeded_resource(self.held) is not None


class _Wish:
    """What somebody waits for. `asked`: what the ledger was last told to be needed for it. `is_granted`: it has come,
    and is about to be taken."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight = Weight()
        self.leases: Sequence[Lease] = ()
        self.asked: list[Need] | None = []
        self.is_granted = False

    def needs(self) -> list[Need]:
        """Returns how large all its leases have to be, or nothing where the ledger cannot help."""
        if not any(lease.can_grow and lease.missing_for(self.weight) for lease in self.leases):
            return []
        return [Need(one.name, one.limit, (one.used + self.weight).where(self.weight)) for one in self.leases]


class Leases:
    """The leases of this ingress. `on_grant` is called whenever some of them grow."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._leases: dict[str, Lease] = {}
        self._wishes: dict[Hashable, _Wish] = {}
        self._numbers = itertools.count()
        self.on_grant: Callable[[], None] = lambda: None

    def of(self, name: str, limit: Weight) -> Lease:
        """Returns the lease of the budget `name`, which is `limit` as a whole."""
        lease = self._leases.setdefault(name, Lease(name, limit))
        lease.limit = limit
        return lease

    def drop(self, name: str) -> None:
        """Gives a lease back of which nothing is used."""
        self._shrink(self._leases.pop(name))

    def want(self, party: Hashable, weight: Weight, leases: Sequence[Lease]) -> None:
        """Asks for what is missing to take `weight` of all these leases. `party`: who waits for it; it has one wish at
        a time."""
        wish = self._wishes.get(party)
        if wish is None:
            wish = self._wishes[party] = _Wish(next(self._numbers))
        wish.weight, wish.leases = weight, leases
        self._ask(wish)

    def leave(self, party: Hashable) -> None:
        """The party waits no more, if it did."""
        wish = self._wishes.pop(party, None)
        if wish is None:
            return
        leases, wish.leases = wish.leases, ()
        self._ask(wish)
        self._return(leases)

    def take(self, weight: Weight, leases: Sequence[Lease]) -> None:
        for lease in leases:
            lease.used += weight
        self._ask_for_all()

    def give(self, weight: Weight, leases: Sequence[Lease]) -> None:
        """Gives back what a request had taken. What others lack goes back to the ledger at once."""
        for lease in leases:
            lease.used -= weight
        self._return(leases)
        self._ask_for_all()

    def receive(self, message: Grant | Recall) -> None:
        match message:
            case Grant(number, amounts):
                self._use(number, amounts)
                self._ask_for_all()
                self.on_grant()
                self._return([self._leases[name] for name in amounts if name in self._leases])
            case Recall(name, is_wanted) if name in self._leases:
                lease = self._leases[name]
                lease.is_recalled = is_wanted
                self._return([lease])
                self._ask_for_all()

    def restate(self) -> None:
        """Tells a new ledger of all leases. It knows of no question that was put to the old one."""
        for lease in self._leases.values():
            lease.is_recalled = False
            self._send(Restate(lease.name, lease.limit, lease.held))
        for wish in self._wishes.values():
            wish.asked = []
        self._ask_for_all()

    def _use(self, number: int, amounts: dict[str, Weight]) -> None:
        for name, amount in amounts.items():
            if name in self._leases:
                self._leases[name].held += amount
            else:  # it was dropped meanwhile
                self._send(GiveBack(name, amount))
        for wish in self._wishes.values():
            if wish.number == number:
                # The ledger may have got a later question. It is told in any case what is needed now.
                wish.asked, wish.is_granted = None, True

    def _return(self, leases: Sequence[Lease]) -> None:
        """Gives back what is not used of those leases that are recalled."""
        for lease in leases:
            if lease.is_recalled:
                self._shrink(lease)

    def _shrink(self, lease: Lease) -> None:
        kept = lease.used
        for wish in self._wishes.values():
            if wish.is_granted and lease in wish.leases:
                kept = kept.largest(lease.used + wish.weight)
        if unused := lease.held.excess_over(kept):
            lease.held -= unused
            self._send(GiveBack(lease.name, unused))

    def _ask_for_all(self) -> None:
        for wish in self._wishes.values():
            self._ask(wish)

    def _ask(self, wish: _Wish) -> None:
        """Tells the ledger when what is needed has changed."""
        needs = wish.needs()
        if needs != wish.asked:
            wish.asked, wish.is_granted = needs, wish.is_granted and not needs
            self._send(Lack(wish.number, needs))
