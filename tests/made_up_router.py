"""A router without Ray, over made-up replicas."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import PendingRequest, ReplicaID

from raylens.deployments.routing.room_router import RoomRouter

MAX_ONGOING = 4


class Replica:
    """As much of Ray's RunningReplica as the router uses."""

    max_ongoing_requests = MAX_ONGOING

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("Worker"))
        self.num_ongoing = 0
        self.num_probes = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        await self.answers.wait()
        await asyncio.sleep(0.001)
        return self.num_ongoing


class Router:
    """A router over replicas of these names; `send` and `end` do what Ray does with a call."""

    def __init__(self, names: Iterable[str] = "abc", kind: type[RoomRouter] = RoomRouter, **limits: int) -> None:
        self.now = 0.0
        self.router = kind(
            DeploymentID("Worker"),
            DeploymentHandleSource.UNKNOWN,
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: self.now,
            initial_backoff_s=60,
            max_backoff_s=60,
        )
        self.router.initialize_state(limits=limits)
        self.replicas = {name: Replica(name) for name in names}
        self.router.update_replicas(list(self.replicas.values()))

    async def send(self, key: str = "", created_at: float = 0.0, method: str = "who") -> Replica:
        replica = await self.send_ahead(key, created_at, method)
        replica.num_ongoing += 1
        assert replica.num_ongoing <= MAX_ONGOING
        return replica

    async def send_ahead(self, key: str = "", created_at: float = 0.0, method: str = "who") -> Replica:
        """Sends a call whose arguments are pending, so the replica does not count it."""
        metadata = SimpleNamespace(session_id=key, call_method=method)
        request = PendingRequest([], {}, metadata, created_at=created_at)
        replica: Replica = await self.router._choose_replica_for_request(request)
        self.router.on_send_request(replica.replica_id)
        return replica

    def end(self, replica: Replica) -> None:
        replica.num_ongoing = max(0, replica.num_ongoing - 1)
        # In Ray's order.
        self.router.on_request_completed(replica.replica_id, "")
        self.router.decrement_queue_len_cache(replica.replica_id)

    async def rest(self) -> None:
        """Lets the time pass after which a report is outdated."""
        await asyncio.sleep(0.01)
        self.now += 60
        for replica in self.replicas.values():
            replica.num_probes = 0
