"""Answers of the Responses API, with their input, from which later requests go on."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from raylens.deployments.config import ResponsesConfig
from raylens.deployments.item_store.kept_files import KeptFile, KeptFiles
from raylens.preprocess.schema import InvalidRequestError

_MAX_RESPONSES = 65536
"""Of all keys together. A shard lists its folder at startup, and each one takes two directory entries."""
_NEWS_SECONDS = 15.0
"""In which all ingresses have connected to a new shard."""


@dataclass(frozen=True, slots=True)
class StoredResponse(KeptFile):
    """`previous_id`: of the response that it went on from, or an empty text."""

    previous_id: str


def _not_found(response_id: str) -> InvalidRequestError:
    reason = f"no response {response_id[:100]!r} (any more)"
    return InvalidRequestError(reason, field="response_id", code="response_not_found", status=404)


class StoredResponses(KeptFiles[StoredResponse]):
    """The responses of one shard's tenants. Each is one line of its input and one of its answer, both JSON."""

    folder_name = "responses"
    not_found = staticmethod(_not_found)

    def __init__(
        self, config: ResponsesConfig, now: Callable[[], float] = time.time, *, shard: int = 0, num_shards: int = 1
    ) -> None:
        super().__init__(StoredResponse, config, now, shard, num_shards)
        self._max_responses = _MAX_RESPONSES // num_shards

    async def store(self, tenant: str, response_id: str, previous_id: str, content: bytes) -> None:
        """Keeps a response, in place of an earlier one with its id. The oldest ones of the tenant that has the most
        bytes make room. Raises InvalidRequestError if it is larger than all room."""
        if len(content) > self._max_bytes:
            reason = f"a response of {len(content)} bytes is not kept, the limit of all is {self._max_bytes}"
            raise InvalidRequestError(reason, field="store", code="no_room", status=413)
        await self.remove_old()
        if (earlier := self._by_tenant.get(tenant, {}).get(response_id)) is not None:
            await self.remove(tenant, earlier)
        while self.num_bytes + len(content) > self._max_bytes or self.num_files >= self._max_responses:
            largest = max(self._by_tenant, key=self._bytes_of.__getitem__)
            await self.remove(largest, next(iter(self._by_tenant[largest].values())))
        created = int(self._now())
        expires = created + int(self._max_age_s)
        await self.keep(tenant, StoredResponse(response_id, len(content), created, expires, previous_id), content)

    async def conversation(self, tenant: str, response_id: str, max_bytes: int) -> bytes:
        """Returns the lines of a response and of all that it went on from, the oldest first. Raises InvalidRequestError
        if one of them is gone, or for more than `max_bytes`."""
        chain, num_bytes, next_id = list[str](), 0, response_id
        while next_id:
            one = await self.get(tenant, next_id)
            chain.append(next_id)
            num_bytes += one.num_bytes
            if num_bytes > max_bytes:  # so does a circle, which clients can make: they may choose their ids
                reason = f"the conversation has {num_bytes} bytes or more, the limit is {max_bytes}"
                raise InvalidRequestError(reason, field="previous_response_id", code="body_too_large", status=413)
            next_id = one.previous_id
        return b"\n".join([await self.read(tenant, one) for one in reversed(chain)])


class ResponsesInWork:
    """Which responses of one shard's tenants ingresses are making in the background."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._cancelled: dict[tuple[str, str], asyncio.Event] = {}

    async def until_cancelled(self, tenant: str, response_id: str) -> None:
        """An ingress waits for this while it makes the response. If the ingress is lost, so is the wait."""
        cancelled = self._cancelled[tenant, response_id] = asyncio.Event()
        try:
            await cancelled.wait()
        finally:
            if self._cancelled.get((tenant, response_id)) is cancelled:
                del self._cancelled[tenant, response_id]

    async def cancel(self, tenant: str, response_id: str) -> None:
        if (cancelled := self._cancelled.get((tenant, response_id))) is not None:
            cancelled.set()

    async def has(self, tenant: str, response_id: str) -> bool:
        """Of a new shard the ingresses have yet to say what they make."""
        is_new = time.monotonic() < self._began + _NEWS_SECONDS
        return is_new or (tenant, response_id) in self._cancelled
