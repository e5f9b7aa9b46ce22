"""A request router that sends a prompt to the replica whose KV cache holds its prefix.

Marks identify a prompt's prefix: hashes of its first 256 characters, of its first 512, and so on. The router records
which replica got which marks. A prompt goes to the replica with the longest known prefix, if that covers at least half
of the prompt. Any other prompt goes by rendezvous hashing of its key. All ingresses hash alike, so a conversation finds
its replica even if its turns arrive at different ingresses. In both cases, the router passes over a replica with far
more calls than the others while another one has room ("consistent hashing with bounded loads", Mirrokni et al., 2016).

    serve.deployment(Generate, ..., request_router_config=room_routing(PrefixRouter))
    handle.options(session_id=PromptAffinity(key, marks).session_id).generate.remote(...)"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ray.serve.request_router import PendingRequest, RunningReplica

from raylens.deployments.routing.replica_choice import Load, rank
from raylens.deployments.routing.room_router import RoomRouter

_MOST_MARKS = 65_536
"""Marks in an ingress's index. The oldest are dropped, as replicas drop their oldest blocks."""
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
    """Maps marks to the replicas that have had them. Keeps the latest `capacity` marks."""

    def __init__(self, capacity: int = _MOST_MARKS) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def add(self, marks: Sequence[str], replica_id: str) -> None:
        for mark in marks:
            self._replicas.setdefault(mark, set()).add(replica_id)
            self._replicas.move_to_end(mark)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def num_known(self, marks: Sequence[str], replica_ids: Sequence[str]) -> dict[str, int]:
        """Returns for each replica the number of leading marks that it has had, without a gap."""
        known = dict.fromkeys(replica_ids, 0)
        having = set(replica_ids)
        for number, mark in enumerate(marks, start=1):
            having &= self._replicas.get(mark, set())
            if not having:
                break
            known |= dict.fromkeys(having, number)
        return known


def spill_order(ranked: Sequence[str], loads: Mapping[str, Load]) -> list[list[str]]:
    """Returns groups of replicas to try in turn: first each replica that is not busy, then each busy one, then all full
    ones together."""
    mean = (sum(load.num_calls for load in loads.values()) + 1) / max(1, len(loads))  # includes this call
    busy = max(_MIN_BUSY_CALLS, _BALANCE_FACTOR * mean)
    full = [replica_id for replica_id in ranked if loads[replica_id].is_full]
    with_room = [replica_id for replica_id in ranked if not loads[replica_id].is_full]
    # Sorting is stable, so both halves keep the key's order.
    with_room.sort(key=lambda replica_id: loads[replica_id].num_calls >= busy)
    return [[replica_id] for replica_id in with_room] + ([full] if full else [])


class PrefixRouter(RoomRouter):
    """Prefix-aware routing. Routes calls without a `session_id` like RoomRouter."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        self._index = MarkIndex()

    def preferences(self, session_id: str, loads: Mapping[str, Load]) -> tuple[list[str], list[list[str]]]:
        if not session_id:
            return super().preferences(session_id, loads)
        ranked = self.ranked(PromptAffinity.of(session_id), list(loads))
        return ranked, spill_order(ranked, loads)

    def ranked(self, affinity: PromptAffinity, replica_ids: Sequence[str]) -> list[str]:
        """Returns the replicas in the prompt's order of preference."""
        by_key = rank(affinity.key, replica_ids)
        known = self._index.num_known(affinity.marks, by_key)
        least = max(1.0, _LEAST_SHARE * len(affinity.marks))
        # Sorting is stable: replicas with equal prefixes keep the key's order.
        return sorted(by_key, key=lambda replica_id: -known[replica_id] if known[replica_id] >= least else 0)

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        replica = await super().choose(pending_request)
        if session_id := pending_request.metadata.session_id:
            self._index.add(PromptAffinity.of(session_id).marks, replica.replica_id.unique_id)
        return replica
