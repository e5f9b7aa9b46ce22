"""A request router that sends a prompt to the replica whose KV cache has its beginning.

A prompt's beginning is told by marks: hashes of its first 256 characters, of its first 512, and so on. The router notes
which replica got which marks. A prompt goes to the replica that has had at least half of it, the one with the most
first. Any other prompt goes by rendezvous hashing of its key, so that all ingresses choose alike: a conversation whose
first turn came to one ingress, and whose second comes to another, finds its replica by the key. A replica that is busy
counts as full in both cases, see `deployments/routing/room_router.py`.

    serve.deployment(Generate, ..., request_router_config=prefix_routing())
    handle.options(session_id=PromptAffinity(key, marks).session_id).generate.remote(...)"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica

from raylens.deployments.routing.room_router import RendezvousRouter, rank, rendezvous_routing

_MOST_MARKS = 65_536
"""The marks that an ingress knows replicas of. The oldest are forgotten, as replicas forget the oldest blocks."""
_LEAST_SHARE = 0.5
"""Of a prompt. Who has had less of it saves less than a better balance brings."""


@dataclass(frozen=True, slots=True)
class PromptAffinity:
    """Where a prompt belongs. `key`: what requests have in common that belong together. `marks`: of its beginning, each
    of a longer one."""

    key: str
    marks: Sequence[str] = ()

    @property
    def session_id(self) -> str:
        """Returns it as Ray Serve carries it, which has a text for this."""
        return " ".join([self.key, *self.marks])

    @classmethod
    def of(cls, session_id: str) -> Self:
        key, *marks = session_id.split(" ")
        return cls(key, marks)


class MarkIndex:
    """Which replicas have had which marks, the latest `capacity` of them."""

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
        """Returns how many of the marks each replica has had, from the first on without a gap."""
        known = dict.fromkeys(replica_ids, 0)
        having = set(replica_ids)
        for number, mark in enumerate(marks, start=1):
            having &= self._replicas.get(mark, set())
            if not having:
                break
            known |= dict.fromkeys(having, number)
        return known


class PrefixRouter(RendezvousRouter):
    """See the module. Calls without a `session_id` go to the less loaded of two."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        self._index = MarkIndex()

    def ranked(self, session_id: str, replica_ids: Sequence[str]) -> list[str]:
        affinity = PromptAffinity.of(session_id)
        by_key = rank(affinity.key, replica_ids)
        known = self._index.num_known(affinity.marks, by_key)
        least = max(1.0, _LEAST_SHARE * len(affinity.marks))
        # Sorting is stable: those that have had as much of it keep the key's order.
        return sorted(by_key, key=lambda replica_id: -known[replica_id] if known[replica_id] >= least else 0)

    async def choose(self, pending_request: PendingRequest) -> RunningReplica:
        replica = await super().choose(pending_request)
        if session_id := pending_request.metadata.session_id:
            self._index.add(PromptAffinity.of(session_id).marks, replica.replica_id.unique_id)
        return replica


def prefix_routing(*, limits: Mapping[str, int] = MappingProxyType({})) -> RequestRouterConfig:
    """What a deployment takes as `request_router_config`. `limits`: see `rendezvous_routing`."""
    return rendezvous_routing(router=PrefixRouter, limits=limits)
