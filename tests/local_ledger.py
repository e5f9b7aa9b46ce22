"""The ledger of all ingresses in this process: its messages arrive a round of the event loop later, in their order."""

import asyncio

from raylens.deployments.item_store.leases import Leases
from raylens.deployments.item_store.ledger import Ledger
from raylens.deployments.item_store.messages import GiveBack, Grant, Lack, Recall, Restate


class LocalLedger:
    """`leases()` is what one ingress has."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.ledger.open()

    def leases(self) -> Leases:
        def to_ledger(message: Lack | GiveBack | Restate) -> None:
            asyncio.get_running_loop().call_soon(receive, message)

        def to_ingress(message: Grant | Recall) -> None:
            asyncio.get_running_loop().call_soon(leases.receive, message)

        def receive(message: Lack | GiveBack | Restate) -> None:
            match message:
                case Lack(number, needs):
                    self.ledger.lack(to_ingress, number, needs)
                case GiveBack(budget, amounts):
                    self.ledger.give_back(to_ingress, budget, amounts)
                case Restate(budget, limit, held):
                    self.ledger.restate(to_ingress, budget, limit, held)

        leases = Leases(to_ledger)
        self.ledger.join(to_ingress)
        return leases
