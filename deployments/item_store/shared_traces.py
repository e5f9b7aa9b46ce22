"""The records of the latest requests of all ingresses, in the shards."""

from contextlib import ExitStack, suppress
from functools import partial

from raylens.deployments.item_store.client import ShardLostError, Shards, unavailable
from raylens.deployments.item_store.messages import CallMethod, KeepTrace
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS


class SharedTraces:
    """A record is in the shard of its request's id; while that one is away, in the next."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def keep(self, tenant: str, request_id: str, record: bytes) -> None:
        self._shards.send(_key(request_id), KeepTrace(tenant, request_id, record))

    async def find(self, tenant: str | None, request_id: str) -> bytes | None:
        """See `RecentTraces.find`. Raises StageUnavailableError where no shard answers."""
        for _ in range(MAX_ATTEMPTS):
            shard = await self._shards.nearest(_key(request_id))
            with suppress(ShardLostError), ExitStack() as pins:
                ask = partial(CallMethod, method="find_trace", arguments=[tenant, request_id])
                found: bytes | None = await shard.ask(ask, pins)
                return found
        raise unavailable()


def _key(request_id: str) -> str:
    return f"trace\0{request_id}"
