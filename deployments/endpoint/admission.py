"""Admission: which requests start, which wait and which are refused, by weight, before anything of them is decoded.

A request takes its weight (requests, bytes of body and media, pixels, tokens) from two budgets: its API key's, and the
total of all keys. All replicas of the ingress share both; each has leases (`deployments/item_store/leases.py`). A
request that finds no room waits. Waiting requests of one replica start in the order of their priority, then of how
little work their key has, then of arrival. Admission refuses a request when too many wait, or when it has waited too
long. A request does not wait for bytes to be free, because its bytes are in memory already: it is refused."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from raylens.deployments.config import AdmissionConfig, Budget
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.item_store.leases import Lease, Leases
from raylens.deployments.item_store.weight import Weight
from raylens.preprocess.schema import InvalidRequestError

_TOTAL, _KEY = "total", "key "
"""The names of budgets: of the one of all requests, and what those of keys begin with."""
_MAX_IDLE_KEYS = 1000
"""Keys whose leases are kept without requests of theirs, so that the next one need not ask for a lease."""
_ANSWER_SECONDS = 0.1
"""How long the ledger takes at most to grant what is free. Who waits longer is in the queue."""
_GROW_SECONDS = 2.0
"""How long a body waits for what other replicas of the ingress leave."""
_MAX_RETRY_SECONDS = 60.0
_NEWEST_SHARE = 0.1
"""The weight of the newest request in the running mean of the time that a request takes."""


class OverloadedError(RuntimeError):
    """There is no room for a request now. `reason`: the budget or queue that is full. `retry_after_s`: when there may
    be room."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class _Quota:
    """This replica's lease of a budget, and how many of its tickets take from it."""

    def __init__(self, owner: str, lease: Lease) -> None:
        self.owner = owner
        self.lease = lease
        self.num_tickets = 0


@dataclass(eq=False, slots=True)
class _Waiter:
    ticket: "Ticket"
    weight: Weight
    priority: int
    number: int
    turn: asyncio.Future[None]

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.priority, self.ticket.quotas[0].lease.used.requests, self.number


class Ticket:
    """One request's place. All that it has taken is given back when its `Admission.ticket` block ends.

    `quotas`: the budgets that it takes from. That of its key comes first, if it has a key, and that of all requests
    last.
    """

    def __init__(self, admission: "Admission", caller: Caller, quotas: list[_Quota]) -> None:
        self.caller = caller
        self.held = Weight()
        self._admission = admission
        self.quotas = quotas

    async def take(self, weight: Weight) -> None:
        """Takes more. Raises OverloadedError if there is no room now, InvalidRequestError if there can never be room
        for this together with what the ticket already holds."""
        self._admission.check_size(self, weight)
        await self._admission.take(self, weight)

    async def enter(self, weight: Weight, priority: int) -> None:
        """Waits for room. Raises OverloadedError if room does not come soon enough, InvalidRequestError if it can never
        come."""
        self._admission.check_size(self, weight)
        await self._admission.wait(self, weight, priority)

    def add(self, weight: Weight) -> None:
        """Counts what there is room for."""
        self.held += weight
        self._admission.leases.take(weight, self.leases)

    @property
    def leases(self) -> list[Lease]:
        return [quota.lease for quota in self.quotas]


class Admission:
    """The admission of one endpoint, on one event loop. It calls `on_refusal(reason)` for each request that it refuses
    for want of room."""

    def __init__(self, config: AdmissionConfig, leases: Leases, on_refusal: Callable[[str], None]) -> None:
        self._config = config
        self.leases = leases
        self._on_refusal = on_refusal
        self._all = _Quota("all requests", leases.of(_TOTAL, weight_of(config.total)))
        self._by_key: dict[str, _Quota] = {}
        self._waiting: list[_Waiter] = []
        self._asking: set[_Waiter] = set()
        self._has_grown = asyncio.Event()
        self._numbers = itertools.count()
        self._mean_seconds = 1.0
        leases.on_grant = self._use_grant

    @contextmanager
    def ticket(self, caller: Caller) -> Iterator[Ticket]:
        quotas = [*self._quotas_of(caller), self._all]
        ticket = Ticket(self, caller, quotas)
        quotas[0].num_tickets += 1
        started = time.monotonic()
        try:
            yield ticket
        finally:
            if ticket.held.requests:
                self._mean_seconds += _NEWEST_SHARE * (time.monotonic() - started - self._mean_seconds)
            self.leases.give(ticket.held, ticket.leases)
            quotas[0].num_tickets -= 1
            self._let_in()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> Weight:
        """Returns what the requests of this replica take of the budget of all requests."""
        return self._all.lease.used

    @property
    def limit(self) -> Weight:
        """Returns the budget of all requests, which all replicas share."""
        return self._all.lease.limit

    def check_size(self, ticket: Ticket, weight: Weight) -> None:
        """Raises InvalidRequestError if a budget is too small for the request, however long it waits."""
        total = ticket.held + weight
        for quota in ticket.quotas:
            if lacking := total.exceeded_resource(quota.lease.limit):
                size, limit = getattr(total, lacking), getattr(quota.lease.limit, lacking)
                reason = f"the request weighs {size} {lacking}, the limit of {quota.owner} together is {limit}"
                raise InvalidRequestError(reason, field="body", code="request_too_large", status=413)

    def refusal(self, reason: str, message: str) -> OverloadedError:
        """Counts a refused request and returns its error."""
        self._on_refusal(reason)
        turns = (len(self._waiting) + 1) / max(1, self._all.lease.used.requests)
        seconds = min(_MAX_RETRY_SECONDS, max(1.0, self._mean_seconds * turns))
        return OverloadedError(f"{message}, try again in {seconds:.0f} s", reason=reason, retry_after_s=seconds)

    async def take(self, ticket: Ticket, weight: Weight) -> None:
        """See `Ticket.take`. Waits until this replica's leases have room, if the others may leave some."""
        deadline = time.monotonic() + _GROW_SECONDS
        try:
            while full := [quota for quota in ticket.quotas if quota.lease.missing_for(weight)]:
                hopeless = [quota for quota in full if not quota.lease.may_come(weight)]
                if hopeless or time.monotonic() >= deadline:
                    quota = (hopeless or full)[0]
                    lacking = quota.lease.missing_for(weight).exceeded_resource(Weight()) or ""
                    raise self.refusal(lacking, f"no room for more {lacking} of {quota.owner} now")
                self._has_grown.clear()
                self.leases.want(ticket, weight, ticket.leases)
                with suppress(TimeoutError):
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._has_grown.wait()
            ticket.add(weight)
        finally:
            self.leases.leave(ticket)

    async def wait(self, ticket: Ticket, weight: Weight, priority: int) -> None:
        """See `Ticket.enter`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(ticket, weight, priority, next(self._numbers), turn)
        self._waiting.append(waiter)
        self._let_in()
        try:
            if not turn.done() and any(lease.can_grow for lease in ticket.leases):
                await asyncio.wait([turn], timeout=_ANSWER_SECONDS)
            if not turn.done():
                self._check_queue(waiter)
                async with asyncio.timeout(self._config.max_queue_seconds):
                    await turn
        except TimeoutError:
            seconds = self._config.max_queue_seconds
            raise self.refusal("queue_seconds", f"no room after {seconds:g} s in the queue") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._let_in()  # the request that left may have kept others from entering

    def _check_queue(self, waiter: _Waiter) -> None:
        before = [other for other in self._waiting if other.number < waiter.number]
        if len(before) >= self._config.max_queued_requests:
            raise self.refusal("queue", f"{len(before)} requests wait already")
        name = waiter.ticket.caller.name
        if name is not None:
            number = sum(other.ticket.caller.name == name for other in before)
            if number >= self._config.max_queued_requests_per_key:
                raise self.refusal("queue_of_key", f"{number} requests of this API key wait already")

    def _let_in(self) -> None:
        """Lets in all requests for which there is room, in order. A request that its own key's budget has no room for
        lets others pass."""
        while True:
            waiter, blocked = self._next()
            if waiter is None:
                break
            self._waiting.remove(waiter)
            waiter.ticket.add(waiter.weight)
            waiter.turn.set_result(None)
            self._ask_for(self._asking - {waiter})  # now, since it has taken what it asked for
        self._ask_for(blocked)

    def _next(self) -> tuple[_Waiter | None, set[_Waiter]]:
        """Returns who is to be let in, and of those before them for whom there is no room the first of each budget."""
        blocked: dict[str, _Waiter] = {}
        known: set[tuple[_Quota, Weight]] = set()
        for waiter in sorted(self._waiting, key=lambda one: one.rank):
            kind = (waiter.ticket.quotas[0], waiter.weight)
            if waiter.turn.done() or kind in known:  # there is no room for its like, which comes before it
                continue
            known.add(kind)
            leases = waiter.ticket.leases
            full = next((one for one in leases if not one.has_place or one.missing_for(waiter.weight)), None)
            if full is None:
                return waiter, set(blocked.values())
            blocked.setdefault(full.name, waiter)
            if full is self._all.lease:
                break  # otherwise small requests would pass a heavy one for ever
        return None, set(blocked.values())

    def _ask_for(self, waiting: set[_Waiter]) -> None:
        """Asks the ledger for what these lack, and for nothing else any more."""
        for waiter in self._asking - waiting:
            self.leases.leave(waiter)
        self._asking = waiting
        for waiter in waiting:
            self.leases.want(waiter, waiter.weight, waiter.ticket.leases)

    def _use_grant(self) -> None:
        self._has_grown.set()
        self._let_in()

    def _quotas_of(self, caller: Caller) -> list[_Quota]:
        """Returns the budget of the caller's key, or none if anybody may call."""
        if caller.name is None:
            return []
        # The file of keys may have changed while the key has requests in work.
        limit = weight_of(self._config.per_key)
        limit = limit if caller.max_requests is None else replace(limit, requests=caller.max_requests)
        lease = self.leases.of(f"{_KEY}{caller.name}", limit)
        if caller.name not in self._by_key and len(self._by_key) >= _MAX_IDLE_KEYS:
            self._drop_idle_keys()
        return [self._by_key.setdefault(caller.name, _Quota("this API key", lease))]

    def _drop_idle_keys(self) -> None:
        """Keys come and go."""
        for name in [name for name, quota in self._by_key.items() if not quota.num_tickets]:
            del self._by_key[name]
            self.leases.drop(f"{_KEY}{name}")


def weight_of(budget: Budget) -> Weight:
    return Weight(budget.requests, budget.bytes, budget.pixels, budget.tokens)
