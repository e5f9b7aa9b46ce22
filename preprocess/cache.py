"""A byte-bounded LRU cache of media items. Concurrent requests for one key share one computation."""

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
EarlyT = TypeVar("EarlyT")


@dataclass(slots=True)
class CacheStats:
    """Totals since the start of items looked up, found and evicted, and the bytes held now."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    num_bytes: int = 0


@dataclass(eq=False)
class _Flight(Generic[V, EarlyT]):
    """One running computation, with a listener for each request that waits for it."""

    task: asyncio.Task[tuple[V, int]] = field(init=False)
    listeners: list[Callable[[EarlyT], None]] = field(default_factory=list)
    announced: list[EarlyT] = field(default_factory=list)  # the latest announcement, or nothing

    def announce(self, news: EarlyT) -> None:
        self.announced[:] = [news]
        for listener in self.listeners:
            listener(news)


class ItemCache(Generic[V, EarlyT]):
    """Keeps the most recently used items, up to `capacity_bytes` in all. For use from one event loop.

    A value may be a reference to the data; `create` reports the size. EarlyT: the type of announcements during the
    computation of a value."""

    def __init__(self, capacity_bytes: int, on_evicted: Callable[[V], None] = lambda value: None) -> None:
        """`on_evicted` gets each value that is evicted for lack of room."""
        self.capacity_bytes = capacity_bytes
        self._on_evicted = on_evicted
        self.stats = CacheStats()
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._flights: dict[str, _Flight[V, EarlyT]] = {}

    @property
    def num_pending(self) -> int:
        """Returns the number of running computations."""
        return len(self._flights)

    def peek(self, key: str) -> V | None:
        """Returns the value, if cached. Changes neither its age nor the counts."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    async def get_or_create(
        self,
        key: str,
        create: Callable[[Callable[[EarlyT], None]], Awaitable[tuple[V, int]]],
        on_announced: Callable[[EarlyT], None] = lambda news: None,
    ) -> tuple[V, bool]:
        """Returns (value, whether it was cached already); calls `create(announce) -> (value, bytes)` if it is missing.

        Concurrent callers with one key share one call of `create`. The call is cancelled when its last caller is
        cancelled. If it fails, all callers get its error and nothing is cached. `on_announced` gets the announcements
        of `create` while the caller waits; a later caller gets the latest announcement at once."""
        self.stats.queries += 1
        if key in self._entries:
            self._entries.move_to_end(key)
            self.stats.hits += 1
            return self._entries[key][0], True
        flight = self._flights.get(key)
        if flight is None:
            flight = self._start(key, create)
        flight.listeners.append(on_announced)
        for early in flight.announced:
            on_announced(early)
        try:
            value, _ = await asyncio.shield(flight.task)
            return value, False
        finally:
            flight.listeners.remove(on_announced)
            if not flight.listeners and not flight.task.done():
                # No caller may join a cancelled computation: the next caller starts a new one.
                self._flights.pop(key, None)
                flight.task.cancel()

    def discard(self, key: str) -> None:
        """Forgets `key`, e.g. because its data has been lost."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.stats.num_bytes -= entry[1]

    def _start(
        self, key: str, create: Callable[[Callable[[EarlyT], None]], Awaitable[tuple[V, int]]]
    ) -> _Flight[V, EarlyT]:
        flight = _Flight[V, EarlyT]()

        async def run() -> tuple[V, int]:
            try:
                value, num_bytes = await create(flight.announce)
            finally:
                # In the task's last step, not in a callback: a caller in between would join a failed computation and
                # fail at once.
                if self._flights.get(key) is flight:
                    del self._flights[key]
            self._keep(key, value, num_bytes)
            return value, num_bytes

        # An empty context, so that the first caller's context variables and cancellation do not affect other callers.
        flight.task = asyncio.create_task(run(), context=contextvars.Context())
        self._flights[key] = flight
        return flight

    def _keep(self, key: str, value: V, num_bytes: int) -> None:
        if num_bytes > self.capacity_bytes:
            return
        self.discard(key)
        self._entries[key] = (value, num_bytes)
        self.stats.num_bytes += num_bytes
        while self.stats.num_bytes > self.capacity_bytes:
            key, (value, _) = next(iter(self._entries.items()))
            self.discard(key)
            self.stats.evictions += 1
            self._on_evicted(value)
