"""Divides the event loop's time between tenants, so that a busy tenant does not delay the others."""

import asyncio
from collections import deque

_QUANTUM_BYTES = 1024
"""Bytes of packed answer pieces that a tenant's requests may read in one iteration of the event loop: about 25 plain
tokens, or three with 20 log-probabilities each. Formatting them takes about half a millisecond, and another tenant's
request needs a dozen iterations until its first token."""


class Turns:
    """Gives each tenant a quantum of work in each iteration of the event loop (deficit round robin). Within a tenant,
    work goes by arrival. After larger work, the tenant skips iterations.

    A tenant below its quantum never waits. A lone tenant hardly waits, because empty iterations take microseconds."""

    def __init__(self, quantum: int = _QUANTUM_BYTES) -> None:
        self._quantum = quantum
        self._spent: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    async def take(self, tenant: str, cost: int) -> None:
        """Waits for the tenant's turn to do work of this cost. Do the work before the next `await`."""
        if tenant not in self._waiting and self._spent.get(tenant, 0) < self._quantum:
            self._spend(tenant, cost)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, cost))
        await turn

    def _spend(self, tenant: str, cost: int) -> None:
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        self._spent[tenant] = self._spent.get(tenant, 0) + cost

    def _begin_iteration(self) -> None:
        self._spent = {tenant: cost - self._quantum for tenant, cost in self._spent.items() if cost > self._quantum}
        if self._spent:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        for tenant, waiting in list(self._waiting.items()):
            while waiting and self._spent.get(tenant, 0) < self._quantum:
                turn, cost = waiting.popleft()
                if not turn.done():  # else its request ended
                    self._spend(tenant, cost)
                    turn.set_result(None)
            if not waiting:
                del self._waiting[tenant]
