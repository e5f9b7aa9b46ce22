"""A request router for Ray Serve that sends calls with the same key to the same replica, by rendezvous hashing.

Every router ranks the replicas by a hash of key and replica. So all routers agree without talking to each other, and
when a replica comes or goes only its own keys move. A call goes to the first replica in its key's ranking that has
room. A replica that has far more to do than the others counts as full ("consistent hashing with bounded loads",
Mirrokni et al., 2016), so a popular key spills to the second of its ranking. A call without a key goes to the less
loaded of two random replicas.

Methods may have limits of their own, below that of the replica. Then calls of one method wait for room, and those of
another go past them.

    serve.deployment(Encode, ..., request_router_config=rendezvous_routing())
    handle.options(session_id=key, stream=True).encode.remote(...)"""

import asyncio
import math
import random
from bisect import insort
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from raylens.deployments.ray_internals.calls_ahead import NOT_ASKED
from raylens.deployments.ray_internals.choosing_router import ChoosingRouter
from raylens.deployments.routing.replica_choice import Load, two_choices

BALANCE_FACTOR = 1.25
MIN_BOUND = 4
_MAX_AGE_S = 0.5
"""Of what a replica has told of its load, where there is a choice. A call that is sent ahead brings no news of it."""


@dataclass(frozen=True, slots=True)
class LoadBound:
    """The load from which on a replica gets no more calls while others have less to do.

    That is `balance_factor` times the mean, but at least `min_bound`: below it affinity is worth more than balance.
    Raises ValueError for a factor under 1 (every replica could be over it) and a minimum under 1.
    """

    balance_factor: float
    min_bound: int

    def __post_init__(self) -> None:
        if not 1 <= self.balance_factor < math.inf:
            raise ValueError(f"balance_factor is {self.balance_factor}, but must be a number from 1 on")
        if self.min_bound < 1:
            raise ValueError(f"min_bound is {self.min_bound}, but must be at least 1")

    def of(self, loads: Collection[int]) -> int:
        """The bound for one call more than these; at least one of the loads is below it."""
        mean = (sum(loads) + 1) / max(1, len(loads))
        return max(self.min_bound, math.ceil(self.balance_factor * mean))


def rank(key: str, replica_ids: Iterable[str]) -> list[str]:
    """The replicas in the key's order of preference, the same in every process."""
    return sorted(replica_ids, key=lambda replica_id: (_weight(key, replica_id), replica_id), reverse=True)


def _weight(key: str, replica_id: str) -> bytes:
    # A key may come from a client's JSON, where half a surrogate pair is legal.
    text = f"{replica_id}\0{key}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()


def spill_order(ranked: Sequence[str], loads: Mapping[str, Load], bound: LoadBound) -> list[list[str]]:
    """Whom to try one after the other: who is within the bound, who is over it, and last all full ones together.

    A replica whose load is unknown is no reason to leave the ranking, and does not count for the mean.
    """
    limit = bound.of([load.num_ongoing for load in loads.values() if load.num_ongoing is not None])
    full = [replica_id for replica_id in ranked if loads[replica_id].is_full]
    with_room = [replica_id for replica_id in ranked if not loads[replica_id].is_full]
    # Sorting is stable: within and over the bound keep the key's order.
    with_room.sort(key=lambda replica_id: (loads[replica_id].num_ongoing or 0) >= limit)
    return [[replica_id] for replica_id in with_room] + ([full] if full else [])


class OldestFirstLock:
    """One call after the other, the oldest first."""

    def __init__(self) -> None:
        self.is_taken = False
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def held(self, created_at: float) -> AsyncIterator[None]:
        if self.is_taken:
            await self._wait(created_at)
        self.is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, created_at: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (created_at, turn)
        insort(self._waiting, entry, key=lambda waiting: waiting[0])
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this call's turn already
                self._pass_on()
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, turn = self._waiting.pop(0)
            # A call that left is cancelled at once, and hears of it in a later round of the event loop.
            if not turn.cancelled():
                turn.set_result(None)
                return
        self.is_taken = False


class RendezvousRouter(ChoosingRouter):
    """Routes by `session_id`; takes LoadBound's fields and `limits` as `request_router_kwargs`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routing_lock = OldestFirstLock()
        self._may_have_room = asyncio.Event()
        self._probes: dict[ReplicaID, asyncio.Task[Any]] = {}
        self._told_at: dict[ReplicaID, float] = {}  # when a replica last told its load, or failed to

    def initialize_state(
        self,
        *,
        balance_factor: float = BALANCE_FACTOR,
        min_bound: int = MIN_BOUND,
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._bound = LoadBound(balance_factor, min_bound)
        self._limits = limits

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int | None) -> None:
        """Ray calls this with every call that a replica takes."""
        if num_ongoing_requests is not NOT_ASKED:
            super().on_new_queue_len_info(replica_id, num_ongoing_requests)
            self._told_at[replica_id] = self.now_s()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._may_have_room.set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Lists of replicas, to be tried one after the other; of one list the least loaded replica is taken."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {replica_id: self._load(replica, pending_request) for replica_id, replica in replicas.items()}
        if pending_request is not None and pending_request.metadata.session_id:
            ranked = self.ranked(pending_request.metadata.session_id, list(replicas))
            order = spill_order(ranked, loads, self._bound)
        else:
            ranked = random.sample(list(replicas), len(replicas))
            order = two_choices(ranked, loads)
        if order:
            # Who is passed over sends no news of itself, and what is known of it may be seconds old.
            passed_over = ranked[: ranked.index(order[0][0])]
            unknown = [replica_id for replica_id in ranked[1:] if loads[replica_id].num_ongoing is None]
            likely = order[0] if len(ranked) > 1 else []
            asked = [*passed_over, *unknown, *(one for one in likely if self._is_old(replicas[one].replica_id))]
            self._start_probes([replicas[replica_id] for replica_id in asked], 0)
        return [[replicas[replica_id] for replica_id in group] for group in order]

    def ranked(self, session_id: str, replica_ids: Sequence[str]) -> list[str]:
        """The replicas in the order in which the call would have them."""
        return rank(session_id, replica_ids)

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        """The replica for this call; waits until one has room, behind older calls that wait too.

        A call of a method without a limit does not wait behind those that have one."""
        replica = None
        is_limited = pending_request.metadata.call_method in self._limits
        if not self._routing_lock.is_taken or (self._limits and not is_limited):
            replica = await self._try_once(pending_request, attempt=0)
        if replica is None:
            # One call at a time asks the full replicas again and again, however many wait.
            async with self._routing_lock.held(pending_request.created_at):
                replica = await self._wait_for_room(pending_request)
        return replica

    async def _wait_for_room(self, pending_request: PendingRequest) -> RunningReplica:
        attempt = 0
        while True:
            self._may_have_room.clear()
            replica = await self._try_once(pending_request, attempt)
            if replica is not None:
                return replica
            # Room that another router's call leaves is found by asking only.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.backoff_s(attempt)):
                    await self._may_have_room.wait()
            attempt += 1

    async def _try_once(self, pending_request: PendingRequest, attempt: int) -> RunningReplica | None:
        """The best replica that is known to have room; better ones that are unknown and full ones are asked first.

        After every answer the choice is made anew: other calls have waited for the same answer.
        """
        asked: set[ReplicaID] = set()
        while True:
            unasked: list[RunningReplica] = []
            for candidates in await self.choose_replicas(list(self.curr_replicas.values()), pending_request):
                replica = self._least_loaded(candidates, pending_request)
                if replica is not None:
                    return replica
                unasked = [replica for replica in candidates if replica.replica_id not in asked]
                if unasked:
                    break
            if not unasked:
                return None
            asked.update(replica.replica_id for replica in unasked)
            await asyncio.wait(self._start_probes(unasked, attempt))

    def _least_loaded(self, candidates: list[RunningReplica], pending_request: PendingRequest) -> RunningReplica | None:
        """The one with the fewest calls of those that are known to have room."""
        best, fewest = None, math.inf
        for replica in candidates:
            load = self._load(replica, pending_request)
            if load.num_ongoing is not None and load.num_ongoing < min(fewest, load.limit):
                best, fewest = replica, load.num_ongoing
        return best

    def _load(self, replica: RunningReplica, pending_request: PendingRequest | None) -> Load:
        """The replica's calls, and up to how many of them it takes this one."""
        limit: int = replica.max_ongoing_requests
        if pending_request is not None:
            limit = min(limit, self._limits.get(pending_request.metadata.call_method, limit))
        return Load(self.replica_queue_len_cache.get(replica.replica_id), limit)

    def _is_old(self, replica_id: ReplicaID) -> bool:
        """Returns whether the replica has not told its load for some time."""
        return self.now_s() - self._told_at.get(replica_id, -math.inf) > _MAX_AGE_S

    def _start_probes(self, replicas: list[RunningReplica], attempt: int) -> list[asyncio.Task[Any]]:
        """Asks each replica for its load, unless it is being asked already: any number of calls wait for one answer."""
        for replica in replicas:
            if replica.replica_id not in self._probes:
                probe = asyncio.create_task(self.probe(replica, attempt))
                self._probes[replica.replica_id] = probe
                probe.add_done_callback(partial(self._end_probe, replica.replica_id))
        return [self._probes[replica.replica_id] for replica in replicas]

    def _end_probe(self, replica_id: ReplicaID, probe: asyncio.Task[Any]) -> None:
        del self._probes[replica_id]
        self._told_at[replica_id] = self.now_s()
        self._told_at = {known: at for known, at in self._told_at.items() if known in self.curr_replicas}


def rendezvous_routing(
    *,
    router: type[RendezvousRouter] = RendezvousRouter,
    balance_factor: float = BALANCE_FACTOR,
    min_bound: int = MIN_BOUND,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> RequestRouterConfig:
    """What a deployment takes as `request_router_config` to route by key.

    `limits`: how many calls of any kind a replica may have for it to get one of this method. Raises ValueError, see
    LoadBound."""
    # Checked here: an error in the router itself shows only in a log, and every call waits for ever.
    bound = LoadBound(balance_factor, min_bound)
    return RequestRouterConfig(
        request_router_class=router, request_router_kwargs={**asdict(bound), "limits": dict(limits)}
    )
