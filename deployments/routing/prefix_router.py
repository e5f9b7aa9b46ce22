"""A request router that sends a prompt to the replica whose KV cache holds its prefix.

Marks identify a prompt's prefix: hashes of its first 256 characters, of its first 512, and so on. The router records
which replica got which marks. A prompt goes to the replica with the longest known prefix, if that covers at least half
of the prompt. Any other prompt goes by consistent hashing of its key. All ingresses hash alike, so a conversation finds
its replica even if its turns arrive at different ingresses. In both cases, the router passes over a replica with far
more calls than the others while another one has room ("consistent hashing with bounded loads", Mirrokni et al., 2016).

    serve.deployment(Generate, ..., request_router_config=room_routing(PrefixRouter))
    handle.options(session_id=PromptAffinity(key, marks).session_id).generate.remote(...)"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ray.serve.request_router import PendingRequest, RunningReplica

from raylens.deployments.routing.replica_choice import HashRing, Load, rank
from raylens.deployments.routing.room_router import SAMPLE, RoomRouter

_MOST_MARKS = 65_536
"""Marks in an ingress's index. The oldest are dropped, as replicas drop their oldest blocks."""
_MOST_REPLICAS = 16
"""Replicas of a mark, so that a call looks at few of many replicas."""
_LEAST_SHARE = 0.5
"""Share of a prompt's marks. A shorter prefix saves less than a better balance gains."""
_BALANCE_FACTOR = 1.25
"""A replica with this many times the mean number of calls is busy."""
_MIN_BUSY_CALLS = 4
"""Below this, affinity is worth more than balance."""


@dataclass(frozen=True, slots=True)
class PromptAffinity:
    """A prompt's preferred placement. `key`: shared by requests that belong together. `marks`: of ever longer
    prefixes."""

    key: str
    marks: Sequence[str] = ()

    @property
    def session_id(self) -> str:
        """Returns the affinity as text for Ray Serve's `session_id`."""
        return " ".join([self.key, *self.marks])

    @classmethod
    def of(cls, session_id: str) -> Self:
        key, *marks = session_id.split(" ")
        return cls(key, marks)


class MarkIndex:
    """Maps marks to the replicas that have had them. Keeps the latest `capacity` marks, each with its latest
    replicas."""

    def __init__(self, capacity: int = _MOST_MARKS) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[str, dict[str, None]] = OrderedDict()

    def add(self, marks: Sequence[str], replica_id: str) -> None:
        for mark in marks:
            having = self._replicas.setdefault(mark, {})
            having.pop(replica_id, None)
            having[replica_id] = None
            if len(having) > _MOST_REPLICAS:
                del having[next(iter(having))]
            self._replicas.move_to_end(mark)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def num_known(self, marks: Sequence[str]) -> dict[str, int]:
        """Returns the number of leading marks, without a gap, of each replica that has had the first one."""
        known: dict[str, int] = {}
        for number, mark in enumerate(marks, start=1):
            having = [one for one in self._replicas.get(mark, ()) if known.get(one, 0) == number - 1]
            if not having:
                break
            known |= dict.fromkeys(having, number)
        return known


class PrefixRouter(RoomRouter):
    """Prefix-aware routing. Routes calls without a `session_id` like RoomRouter."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        self._index = MarkIndex()
        self._ring = HashRing()

    def use(self, replicas: list[RunningReplica]) -> None:
        super().use(replicas)
        self._by_id = {one.replica_id.unique_id: one for one in replicas}
        self._ring.set(self._by_id)

    def groups(self, pending_request: PendingRequest) -> Iterator[Mapping[RunningReplica, Load]]:
        """Yields each replica that is not busy, then each busy one, then all full ones together."""
        if not (session_id := pending_request.metadata.session_id):
            yield from super().groups(pending_request)
            return
        sample = [self.load(one, pending_request).num_calls for one in self.drawn(SAMPLE)]
        mean = sum(sample) / max(1, len(sample)) + 1 / max(1, len(self.replicas))  # includes this call
        most = max(_MIN_BUSY_CALLS, _BALANCE_FACTOR * mean)
        busy, full = dict[RunningReplica, Load](), dict[RunningReplica, Load]()
        for replica in map(self._by_id.__getitem__, self.ranked(PromptAffinity.of(session_id))):
            load = self.load(replica, pending_request)
            if load.is_full or load.num_calls >= most:
                (full if load.is_full else busy)[replica] = load
            else:
                self.probe_outdated([replica], [*busy, *full])
                yield {replica: load}
        yield from ({one: load} for one, load in busy.items())
        if full:
            yield full

    def ranked(self, affinity: PromptAffinity) -> Iterator[str]:
        """Yields the replicas in the prompt's order of preference: first those with most of its prefix."""
        least = max(1.0, _LEAST_SHARE * len(affinity.marks))
        known = self._index.num_known(affinity.marks)
        having = [one for one, number in known.items() if number >= least and one in self._by_id]
        # Sorting is stable: replicas with equal prefixes keep the key's order.
        yield from sorted(rank(affinity.key, having), key=lambda one: -known[one])
        yield from (one for one in self._ring.order(affinity.key) if one not in having)

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        replica = await super().choose(pending_request)
        if session_id := pending_request.metadata.session_id:
            self._index.add(PromptAffinity.of(session_id).marks, replica.replica_id.unique_id)
        return replica
