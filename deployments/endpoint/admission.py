"""Admission starts, queues or refuses requests before any part of them is decoded.

Two budgets bound the cost of all running requests (requests, bytes of body and media, pixels, tokens): one for each API
key, and one for all keys. Each of several ingresses admits an equal share of both. A request without room waits.
Waiting requests start by priority, then by the number of their key's running requests, then by arrival. Admission
refuses a request when the queue is full, or when the request has waited too long. A request never waits for bytes: they
are already in memory, so it is refused at once.

A batch's request starts while half of both budgets is free, behind all others, and waits as long as it has to. It takes
no place in the queue from others."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from raylens.deployments.config import AdmissionConfig
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.request_cost import RESOURCES, RequestCost
from raylens.preprocess.schema import InvalidRequestError

_MAX_RETRY_SECONDS = 60.0
_NEWEST_SHARE = 0.1
"""The weight of the newest request in the running mean of request durations."""


class OverloadedError(RuntimeError):
    """There is no room now. `reason`: the full budget or queue. `retry_after_s`: the estimated wait."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class _Quota:
    """A budget. `limit`: all of it. `share`: this ingress' part. `used`: the cost of this ingress' requests."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.limit = self.share = self.used = RequestCost()
        self.num_tickets = 0

    def share_of(self, caller: Caller) -> RequestCost:
        return self.share // 2 if caller.is_batch else self.share

    def lacking(self, cost: RequestCost, ticket: "Ticket") -> str | None:
        """Returns the first resource without room for `cost`, or None. A request may exceed the share of a resource
        that no other request uses (`held` is all of `used`), else one larger than the share could never start."""
        share, held = self.share_of(ticket.caller), ticket.held
        for name in RESOURCES:
            more, used = getattr(cost, name), getattr(self.used, name)
            if more and used + more > getattr(share, name) and used > getattr(held, name):
                return name
        return None


@dataclass(eq=False, slots=True)
class _Waiter:
    ticket: "Ticket"
    cost: RequestCost
    priority: int
    number: int
    turn: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class Ticket:
    """One request's place. The end of its `Admission.ticket` block returns everything that it has taken. `quotas`: its
    budgets, first the key's, if the caller has one, and last the budget of all requests."""

    admission: "Admission"
    caller: Caller
    quotas: list[_Quota]
    held: RequestCost = field(default_factory=RequestCost)

    def take(self, cost: RequestCost) -> None:
        """Takes more at once. Raises OverloadedError without room now, and as `Admission.check_size`."""
        self.admission.check_size(self, cost)
        for quota in self.quotas:
            if lacking := quota.lacking(cost, self):
                raise self.admission.refusal(lacking, f"no room for more {lacking} of {quota.owner} now")
        self.add(cost)

    async def enter(self, cost: RequestCost, priority: int) -> None:
        """Waits for room. Raises OverloadedError for a full queue or a long wait, and as `Admission.check_size`."""
        self.admission.check_size(self, cost)
        await self.admission.wait(self, cost, priority)

    def add(self, cost: RequestCost) -> None:
        self.held += cost
        for quota in self.quotas:
            quota.used += cost


class Admission:
    """Use it on one event loop. It calls `on_refusal(reason)` for each request refused for lack of room.

    `all`: the budget of all requests at all ingresses, and what this ingress uses of it."""

    def __init__(self, config: AdmissionConfig, on_refusal: Callable[[str], None]) -> None:
        self._config = config
        self._on_refusal = on_refusal
        self._num_ingresses = 1
        self.all = _Quota("all requests")
        self._by_key: dict[str, _Quota] = {}
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._mean_seconds = 1.0
        self._per_key = RequestCost(**config.per_key.model_dump())
        self._set_limit(self.all, RequestCost(**config.total.model_dump()))

    def divide(self, num_ingresses: int) -> None:
        """Limits this ingress to its share of each budget from now on."""
        if num_ingresses == self._num_ingresses:
            return
        self._num_ingresses = num_ingresses
        for quota in (self.all, *self._by_key.values()):
            self._set_limit(quota, quota.limit)
        self._let_in()

    @contextmanager
    def ticket(self, caller: Caller) -> Iterator[Ticket]:
        quotas = [self.all] if caller.name is None else [self._quota_of(caller.name, caller.max_requests), self.all]
        ticket = Ticket(self, caller, quotas)
        quotas[0].num_tickets += 1
        started = time.monotonic()
        try:
            yield ticket
        finally:
            if ticket.held.requests and not caller.is_batch:
                self._mean_seconds += _NEWEST_SHARE * (time.monotonic() - started - self._mean_seconds)
            ticket.add(RequestCost() - ticket.held)
            quotas[0].num_tickets -= 1
            if caller.name is not None and not quotas[0].num_tickets:
                del self._by_key[caller.name]  # keys come and go
            self._let_in()

    @property
    def num_waiting(self) -> int:
        """Live requests: those of batches wait as a rule."""
        return sum(not one.ticket.caller.is_batch for one in self._waiting)

    def check_size(self, ticket: Ticket, cost: RequestCost) -> None:
        """Raises InvalidRequestError if the ticket's total exceeds a whole budget, so that waiting would not help."""
        total = ticket.held + cost
        for quota in ticket.quotas:
            if lacking := total.exceeded_resource(quota.limit):
                size, limit = getattr(total, lacking), getattr(quota.limit, lacking)
                reason = f"the request needs {size} {lacking}, the limit of {quota.owner} together is {limit}"
                raise InvalidRequestError(reason, field="body", code="request_too_large", status=413)

    def refusal(self, reason: str, message: str) -> OverloadedError:
        """Counts a refused request and returns its error."""
        self._on_refusal(reason)
        turns = (self.num_waiting + 1) / max(1, self.all.used.requests)
        seconds = min(_MAX_RETRY_SECONDS, max(1.0, self._mean_seconds * turns))
        return OverloadedError(f"{message}, try again in {seconds:.0f} s", reason=reason, retry_after_s=seconds)

    async def wait(self, ticket: Ticket, cost: RequestCost, priority: int) -> None:
        """See `Ticket.enter`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(ticket, cost, priority, next(self._numbers), turn)
        self._waiting.append(waiter)
        self._let_in()
        try:
            if ticket.caller.is_batch:
                await turn
            elif not turn.done():
                self._check_queue(waiter)
                async with asyncio.timeout(self._config.max_queue_seconds):
                    await turn
        except TimeoutError:
            reason = f"no room after {self._config.max_queue_seconds:g} s in the queue"
            raise self.refusal("queue_seconds", reason) from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._let_in()  # this request may have blocked others

    def _check_queue(self, waiter: _Waiter) -> None:
        earlier = (other for other in self._waiting if other.number < waiter.number)
        before = [other for other in earlier if not other.ticket.caller.is_batch]
        if len(before) >= self._config.max_queued_requests:
            raise self.refusal("queue", f"{len(before)} requests wait already")
        name = waiter.ticket.caller.name
        number = sum(other.ticket.caller.name == name for other in before)
        if name is not None and number >= self._config.max_queued_requests_per_key:
            raise self.refusal("queue_of_key", f"{number} requests of this API key wait already")

    def _let_in(self) -> None:
        """Admits all waiting requests that have room, in order, past those that only their key's budget blocks."""
        while (waiter := self._next()) is not None:
            self._waiting.remove(waiter)
            waiter.ticket.add(waiter.cost)
            waiter.turn.set_result(None)

    def _next(self) -> _Waiter | None:
        refused: set[tuple[_Quota, RequestCost]] = set()
        alone: set[_Quota] = set()
        in_order = sorted(self._waiting, key=lambda one: (one.priority, one.ticket.quotas[0].used.requests, one.number))
        for waiter in in_order:
            own, cost = waiter.ticket.quotas[0], waiter.cost
            if waiter.turn.done() or own in alone or (own, cost) in refused:
                continue
            full = next((quota for quota in waiter.ticket.quotas if quota.lacking(cost, waiter.ticket)), None)
            if full is None:
                return waiter
            too_large = cost.exceeded_resource(full.share_of(waiter.ticket.caller))
            if full is self.all and not (too_large and waiter.ticket.caller.is_batch):
                break  # smaller requests would starve it
            refused.add((own, cost))
            if full is own and too_large:
                alone.add(own)  # it needs an idle key: smaller requests would starve it
        return None

    def _quota_of(self, key: str, max_requests: int | None) -> _Quota:
        """Returns the budget of the key of this name, whose limit may have changed while its requests run."""
        quota = self._by_key.setdefault(key, _Quota("this API key"))
        limit = self._per_key if max_requests is None else replace(self._per_key, requests=max_requests)
        self._set_limit(quota, limit)
        return quota

    def _set_limit(self, quota: _Quota, limit: RequestCost) -> None:
        quota.limit, quota.share = limit, limit // self._num_ingresses
