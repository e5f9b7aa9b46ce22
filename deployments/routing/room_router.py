"""A request router for Ray Serve: a call goes to the less loaded of two random replicas with room for it.

Methods may have limits below the replica's. Calls of other methods overtake calls that wait for their method's room.

    serve.deployment(Encode, ..., request_router_config=room_routing(limits={"encode": 8}))"""

import asyncio
import math
import random
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from ray import ObjectRef
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from raylens.deployments.ray_internals.calls_ahead import NOT_ASKED
from raylens.deployments.ray_internals.choosing_router import ChoosingRouter
from raylens.deployments.routing.replica_choice import Load, least_loaded, two_choices

_MAX_AGE_S = 0.5
"""The router polls a candidate whose last report is older. Calls that are sent ahead return no report, and other
processes send calls, too."""
SAMPLE = 16
"""Random replicas that stand for all."""


class OldestFirstLock:
    """A lock that serves waiting calls oldest first."""

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
            if not turn.cancelled():  # this call had just got the lock
                self._pass_on()
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, turn = self._waiting.pop(0)
            # A call that left is cancelled at once, but resumes in a later round of the event loop.
            if not turn.cancelled():
                turn.set_result(None)
                return
        self.is_taken = False


class RoomRouter(ChoosingRouter):
    """Routes by load; takes `limits` and `num_results` as `request_router_kwargs`.

    Ray's cache of loads forgets calls in flight: a probe's answer replaces the count and omits calls with pending
    arguments. So the router counts its own unfinished calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Otherwise, calls after a rest would all go to the only replica with a cached load.
        self.keep_reports()
        self._in_flight: Counter[ReplicaID] = Counter()
        self._routing_lock = OldestFirstLock()
        self._may_have_room = asyncio.Event()
        self._probes: dict[ReplicaID, asyncio.Task[Any]] = {}
        self._reported_at: dict[ReplicaID, float] = {}  # also after a failed probe
        self.replicas: list[RunningReplica] = []

    def initialize_state(
        self, *, limits: Mapping[str, int] = MappingProxyType({}), num_results: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._limits = limits
        self.num_results = num_results

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.use(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray calls this when a call finds its replica dead, long before the controller reports the death."""
        super().on_replica_actor_died(replica_id)
        self.use([*self.curr_replicas.values()])

    def use(self, replicas: list[RunningReplica]) -> None:
        """Chooses among these from now on."""
        self.replicas = replicas
        self._reported_at = {known: at for known, at in self._reported_at.items() if known in self.curr_replicas}

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int | None) -> None:
        """Ray calls this for every call that a replica takes."""
        if num_ongoing_requests is not NOT_ASKED:
            super().on_new_queue_len_info(replica_id, num_ongoing_requests)
            self._reported_at[replica_id] = self.now_s()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls this once per choice, whether or not the call was sent or accepted."""
        self._in_flight[replica_id] -= 1
        if self._in_flight[replica_id] <= 0:
            del self._in_flight[replica_id]
        self._may_have_room.set()

    def groups(self, pending_request: PendingRequest) -> Iterator[Mapping[RunningReplica, Load]]:
        """Yields groups of replicas to try in turn, with their loads. The least loaded replica of a group gets the
        call. Looks at few of many replicas where these have room."""
        loads = {one: self.load(one, pending_request) for one in self.drawn(SAMPLE)}
        if all(load.is_full for load in loads.values()):
            loads = {one: self.load(one, pending_request) for one in self.drawn(len(self.replicas))}
        groups = two_choices(shuffled := [*loads], loads)
        if groups:
            self.probe_outdated(groups[0], shuffled[: shuffled.index(groups[0][0])])
        yield from ({one: loads[one] for one in group} for group in groups)

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        """Returns the replica for this call; waits behind older calls until one has room.

        Calls of methods without a limit do not wait behind calls of limited methods."""
        replica = None
        is_limited = pending_request.metadata.call_method in self._limits
        if not self._routing_lock.is_taken or (self._limits and not is_limited):
            replica = await self._try_once(pending_request, attempt=0)
        if replica is None:
            # Only one call at a time polls the full replicas.
            async with self._routing_lock.held(pending_request.created_at):
                replica = await self._wait_for_room(pending_request)
        self._in_flight[replica.replica_id] += 1
        return replica

    def drawn(self, number: int) -> list[RunningReplica]:
        """Returns as many random replicas, or all."""
        return random.sample(self.replicas, min(number, len(self.replicas)))

    def probe_outdated(self, candidates: Sequence[RunningReplica], passed_over: Sequence[RunningReplica] = ()) -> None:
        """Probes candidates whose report is outdated, and replicas that are passed over: these get no call that would
        return a report."""
        if len(self.replicas) > 1:
            outdated = [one for one in candidates if self._is_outdated(one.replica_id)]
            self._start_probes([*passed_over, *outdated], 0)

    async def _wait_for_room(self, pending_request: PendingRequest) -> RunningReplica:
        attempt = 0
        while True:
            self._may_have_room.clear()
            replica = await self._try_once(pending_request, attempt)
            if replica is not None:
                return replica
            # Only polling discovers room that another router's call leaves.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.backoff_s(attempt)):
                    await self._may_have_room.wait()
            attempt += 1

    async def _try_once(self, pending_request: PendingRequest, attempt: int) -> RunningReplica | None:
        """Returns the best replica with known room. First probes better replicas without a report, and full ones.

        Each answer restarts the choice, because other calls waited for the same answer."""
        asked: set[ReplicaID] = set()
        while True:
            unasked: list[RunningReplica] = []
            for group in self.groups(pending_request):
                replica = least_loaded(group)
                if replica is not None:
                    return replica
                unasked = [replica for replica in group if replica.replica_id not in asked]
                if unasked:
                    break
            if not unasked:
                return None
            asked.update(replica.replica_id for replica in unasked)
            await asyncio.wait(self._start_probes(unasked, attempt))

    def load(self, replica: RunningReplica, pending_request: PendingRequest) -> Load:
        """Returns the replica's load with regard to the call's method."""
        method, in_flight = pending_request.metadata.call_method, self._in_flight[replica.replica_id]
        limit: int = min(replica.max_ongoing_requests, self._limits.get(method, replica.max_ongoing_requests))
        reported: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        # A replica does not count calls that wait for their arguments.
        is_waiting = any(isinstance(one, ObjectRef) for one in pending_request.args)
        # A replica refuses a call for which it has no room, unless it is not asked.
        is_unasked = method in self.num_results and not is_waiting
        num_calls = max(reported or 0, in_flight) if is_unasked else reported or 0
        return Load(reported, in_flight, is_full=reported is not None and num_calls >= limit)

    def _is_outdated(self, replica_id: ReplicaID) -> bool:
        return self.now_s() - self._reported_at.get(replica_id, -math.inf) > _MAX_AGE_S

    def _start_probes(self, replicas: list[RunningReplica], attempt: int) -> list[asyncio.Task[Any]]:
        """Probes each replica's load. Concurrent calls share one probe per replica."""
        for replica in replicas:
            if replica.replica_id not in self._probes:
                probe = self._probes[replica.replica_id] = asyncio.create_task(self.probe(replica, attempt))
                probe.add_done_callback(partial(self._end_probe, replica.replica_id))
        return [self._probes[replica.replica_id] for replica in replicas]

    def _end_probe(self, replica_id: ReplicaID, probe: asyncio.Task[Any]) -> None:
        del self._probes[replica_id]
        if replica_id in self.curr_replicas:
            self._reported_at[replica_id] = self.now_s()


def room_routing(
    router: type[RoomRouter] = RoomRouter,
    *,
    limits: Mapping[str, int] = MappingProxyType({}),
    num_results: Mapping[str, int] = MappingProxyType({}),
) -> RequestRouterConfig:
    """Returns a deployment's `request_router_config`. `limits`: by method, the calls of any kind at which a replica
    gets no further call of this method. `num_results`: by method of calls ahead, the number of its results, see
    `results_of`."""
    settings = {"limits": dict(limits), "num_results": dict(num_results)}
    return RequestRouterConfig(request_router_class=router, request_router_kwargs=settings)
