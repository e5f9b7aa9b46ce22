"""Admission: which requests start, which wait and which are refused, before anything of them is decoded.

Two budgets bound the cost of all requests in work (requests, bytes of body and media, pixels, tokens): one of each API
key, and one of all keys. Each of several ingresses admits an equal share of both. A request that finds no room waits.
Waiting requests start in the order of their priority, then of how little work their key has, then of arrival. Admission
refuses a request when too many wait, or when it has waited too long. A request never waits for bytes, because its bytes
are in memory already: it is refused at once."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from raylens.deployments.config import AdmissionConfig, Budget
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.request_cost import RESOURCES, RequestCost
from raylens.preprocess.schema import InvalidRequestError

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
    """A budget. `limit`: all of it; `share`: this ingress' part; `used`: what the requests of this ingress take."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.limit = self.share = self.used = RequestCost()
        self.num_tickets = 0

    def lacking(self, cost: RequestCost, held: RequestCost) -> str | None:
        """Returns the first resource that has no room for `cost`, None if all have. A request that holds all that is
        used of a resource, `held`, may exceed the share: else a request larger than the share would never start."""
        for name in RESOURCES:
            more, used = getattr(cost, name), getattr(self.used, name)
            if more and used + more > getattr(self.share, name) and used > getattr(held, name):
                return name
        return None


@dataclass(eq=False, slots=True)
class _Waiter:
    ticket: "Ticket"
    cost: RequestCost
    priority: int
    number: int
    turn: asyncio.Future[None]

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.priority, self.ticket.quotas[0].used.requests, self.number


class Ticket:
    """One request's place. All that it has taken is given back when its `Admission.ticket` block ends.

    `quotas`: the budgets that it takes from. That of its key comes first, if it has a key, and that of all requests
    last.
    """

    def __init__(self, admission: "Admission", caller: Caller, quotas: list[_Quota]) -> None:
        self.caller = caller
        self.held = RequestCost()
        self._admission = admission
        self.quotas = quotas

    def take(self, cost: RequestCost) -> None:
        """Takes more at once. Raises OverloadedError if there is no room now, InvalidRequestError if there can never be
        room for this together with what the ticket already holds."""
        self._admission.check_size(self, cost)
        for quota in self.quotas:
            if lacking := quota.lacking(cost, self.held):
                raise self._admission.refusal(lacking, f"no room for more {lacking} of {quota.owner} now")
        self.add(cost)

    async def enter(self, cost: RequestCost, priority: int) -> None:
        """Waits for room. Raises OverloadedError if room does not come soon enough, InvalidRequestError if it can never
        come."""
        self._admission.check_size(self, cost)
        await self._admission.wait(self, cost, priority)

    def add(self, cost: RequestCost) -> None:
        """Counts what there is room for."""
        self.held += cost
        for quota in self.quotas:
            quota.used += cost

    def release(self) -> None:
        for quota in self.quotas:
            quota.used -= self.held


class Admission:
    """The admission of one endpoint, on one event loop. It calls `on_refusal(reason)` for each request that it refuses
    for want of room."""

    def __init__(self, config: AdmissionConfig, on_refusal: Callable[[str], None]) -> None:
        self._config = config
        self._on_refusal = on_refusal
        self._num_ingresses = 1
        self._all = _Quota("all requests")
        self._by_key: dict[str, _Quota] = {}
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._mean_seconds = 1.0
        self._set_limit(self._all, _cost_of(config.total))

    def divide(self, num_ingresses: int) -> None:
        """Admits no more than this ingress' share of each budget from now on."""
        if num_ingresses == self._num_ingresses:
            return
        self._num_ingresses = num_ingresses
        for quota in (self._all, *self._by_key.values()):
            self._set_limit(quota, quota.limit)
        self._let_in()

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
            ticket.release()
            quotas[0].num_tickets -= 1
            if caller.name is not None and not quotas[0].num_tickets:
                del self._by_key[caller.name]  # keys come and go
            self._let_in()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> RequestCost:
        """Returns what the requests of this ingress take of the budget of all requests."""
        return self._all.used

    @property
    def limit(self) -> RequestCost:
        """Returns the budget of all requests at all ingresses."""
        return self._all.limit

    def check_size(self, ticket: Ticket, cost: RequestCost) -> None:
        """Raises InvalidRequestError if a budget is too small for the request, however long it waits."""
        total = ticket.held + cost
        for quota in ticket.quotas:
            if lacking := total.exceeded_resource(quota.limit):
                size, limit = getattr(total, lacking), getattr(quota.limit, lacking)
                reason = f"the request needs {size} {lacking}, the limit of {quota.owner} together is {limit}"
                raise InvalidRequestError(reason, field="body", code="request_too_large", status=413)

    def refusal(self, reason: str, message: str) -> OverloadedError:
        """Counts a refused request and returns its error."""
        self._on_refusal(reason)
        turns = (len(self._waiting) + 1) / max(1, self._all.used.requests)
        seconds = min(_MAX_RETRY_SECONDS, max(1.0, self._mean_seconds * turns))
        return OverloadedError(f"{message}, try again in {seconds:.0f} s", reason=reason, retry_after_s=seconds)

    async def wait(self, ticket: Ticket, cost: RequestCost, priority: int) -> None:
        """See `Ticket.enter`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(ticket, cost, priority, next(self._numbers), turn)
        self._waiting.append(waiter)
        self._let_in()
        try:
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
        while (waiter := self._next()) is not None:
            self._waiting.remove(waiter)
            waiter.ticket.add(waiter.cost)
            waiter.turn.set_result(None)

    def _next(self) -> _Waiter | None:
        refused: set[tuple[_Quota, RequestCost]] = set()
        alone: set[_Quota] = set()
        for waiter in sorted(self._waiting, key=lambda one: one.rank):
            own, cost = waiter.ticket.quotas[0], waiter.cost
            if waiter.turn.done() or own in alone or (own, cost) in refused:
                continue
            full = next((quota for quota in waiter.ticket.quotas if quota.lacking(cost, waiter.ticket.held)), None)
            if full is None:
                return waiter
            if full is self._all:
                break  # smaller requests would starve it
            refused.add((own, cost))
            if cost.exceeded_resource(own.share):  # it starts alone: smaller requests of its key would starve it
                alone.add(own)
        return None

    def _quotas_of(self, caller: Caller) -> list[_Quota]:
        """Returns the budget of the caller's key, or none if anybody may call."""
        if caller.name is None:
            return []
        quota = self._by_key.setdefault(caller.name, _Quota("this API key"))
        # The file of keys may have changed while the key has requests in work.
        limit = _cost_of(self._config.per_key)
        self._set_limit(quota, limit if caller.max_requests is None else replace(limit, requests=caller.max_requests))
        return [quota]

    def _set_limit(self, quota: _Quota, limit: RequestCost) -> None:
        quota.limit, quota.share = limit, limit // self._num_ingresses


def _cost_of(budget: Budget) -> RequestCost:
    return RequestCost(budget.requests, budget.bytes, budget.pixels, budget.tokens)
