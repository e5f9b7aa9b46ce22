"""Divides budgets among the replicas of the ingress, so that what they let in together stays within each budget.

A replica lets requests in on its own, as long as its leases have room: then no request waits for a message. A lease
that is too small is asked to grow. While nobody lacks anything, it also gets a share of what is free. Otherwise wishes
are granted in the order of asking, and everybody gives back at once what they do not use. A wish may concern several
budgets, and is granted as a whole: two replicas would else wait for each other.

Amounts of grants and returns are differences, so that messages which cross on their way do no harm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, TypeAlias

from raylens.deployments.item_store.messages import Grant, Need, Recall
from raylens.deployments.item_store.weight import Weight

Borrower: TypeAlias = Callable[[Grant | Recall], Any]
"""Who borrows is known by the function that sends messages to it."""


@dataclass(slots=True)
class _Account:
    """One budget: its `limit`, what each borrower has, and who is to give back what it does not use."""

    limit: Weight
    leases: dict[Borrower, Weight] = field(default_factory=dict)
    recalled: set[Borrower] = field(default_factory=set)

    @property
    def free(self) -> Weight:
        return self.limit - reduce(add, self.leases.values(), Weight())


class Ledger:
    """The leases of all budgets, by the budgets' names. It grants nothing before it is opened, so that those who had
    leases from a ledger that is gone have time to say so."""

    PATIENCE_SECONDS = 1.0
    """How long that takes: an ingress that has lost a shard looks for it several times a second."""

    def __init__(self) -> None:
        self._borrowers: set[Borrower] = set()
        self._accounts: dict[str, _Account] = {}
        self._wishes: dict[tuple[Borrower, int], Sequence[Need]] = {}
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._settle()

    def join(self, borrower: Borrower) -> None:
        self._borrowers.add(borrower)

    def leave(self, borrower: Borrower) -> None:
        """Takes back all that the borrower has."""
        self._borrowers.discard(borrower)
        self._wishes = {key: needs for key, needs in self._wishes.items() if key[0] is not borrower}
        for account in self._accounts.values():
            account.leases.pop(borrower, None)
            account.recalled.discard(borrower)
        self._settle()

    def restate(self, borrower: Borrower, name: str, limit: Weight, held: Weight) -> None:
        """Notes what a borrower has from a ledger that is gone."""
        self._account(name, limit).leases[borrower] = held

    def lack(self, borrower: Borrower, number: int, needs: Sequence[Need]) -> None:
        """Grants what the borrower needs for its wish `number`, now or later. A wish that has changed keeps its place;
        one that needs nothing any more leaves the queue."""
        if needs:
            self._wishes[borrower, number] = needs
            self._settle()
        elif self._wishes.pop((borrower, number), None) is not None:
            self._settle()

    def give_back(self, borrower: Borrower, name: str, amounts: Weight) -> None:
        account = self._accounts.get(name)
        if account is None or borrower not in account.leases:
            return  # it has left, or has come back to another ledger
        account.leases[borrower] -= amounts
        self._settle()

    def _account(self, name: str, limit: Weight) -> _Account:
        account = self._accounts.setdefault(name, _Account(limit))
        account.limit = limit
        return account

    def _settle(self) -> None:
        """Grants what it can, and recalls what is lacking."""
        if not self._is_open:
            return
        lacking: dict[str, Borrower] = {}
        """Budgets that have no room for somebody, and who is the first of these. Who needs one of them waits, too."""
        for (borrower, number), needs in list(self._wishes.items()):
            if not lacking.keys().isdisjoint(need.budget for need in needs):
                continue
            missing = {need.budget: self._missing(borrower, need) for need in needs}
            full = [name for name, amount in missing.items() if amount.exceeded_resource(self._accounts[name].free)]
            lacking |= dict.fromkeys(full, borrower)
            if not full:
                del self._wishes[borrower, number]
                self._grant(borrower, number, missing)
        for name, account in list(self._accounts.items()):
            self._recall(name, account, self._borrowers - {lacking[name]} if name in lacking else set())
            if not any(account.leases.values()) and name not in lacking:
                del self._accounts[name]

    def _missing(self, borrower: Borrower, need: Need) -> Weight:
        return need.lease.excess_over(self._account(need.budget, need.limit).leases.get(borrower, Weight()))

    def _grant(self, borrower: Borrower, number: int, missing: dict[str, Weight]) -> None:
        amounts: dict[str, Weight] = {}
        for name, amount in missing.items():
            account = self._accounts[name]
            if not self._wishes and not account.recalled:
                amount += (account.free - amount) // max(1, len(self._borrowers))
            account.leases[borrower] = account.leases.get(borrower, Weight()) + amount
            amounts[name] = amount
        borrower(Grant(number, amounts))

    def _recall(self, name: str, account: _Account, wanted: set[Borrower]) -> None:
        for borrower in account.recalled ^ wanted:
            borrower(Recall(name, borrower in wanted))
        account.recalled = wanted
