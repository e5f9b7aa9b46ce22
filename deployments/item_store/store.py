"""The SharedState deployment: a plain class, wrapped by `deployments/app.py`. Its replica is one shard.

Ingress replicas have no state of their own. The shards hold their shared state, divided by hashes: the items and their
caches, the names that clients gave to items, uploaded files and batches. Each ingress keeps a connection to every shard
(`deployments/item_store/client.py`)."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray import ObjectRef

from raylens.deployments.config import AppConfig
from raylens.deployments.item_store.batches import Batches
from raylens.deployments.item_store.codec import pack, read
from raylens.deployments.item_store.item_maker import ItemMaker
from raylens.deployments.item_store.item_states import ContentMissingError, MadeItem, StoredItem
from raylens.deployments.item_store.messages import (
    FROM_INGRESS,
    Ask,
    CallMethod,
    Close,
    Evict,
    Failed,
    FromIngress,
    Made,
    Message,
    Pending,
    Remember,
    Result,
)
from raylens.deployments.item_store.stored_responses import ResponsesInWork, StoredResponses
from raylens.deployments.item_store.uploads import Upload, Uploads
from raylens.deployments.metrics.definitions import ItemMetrics
from raylens.deployments.ray_internals.handles import route_on_this_loop
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.stages.object_contents import received, sent, stored
from raylens.deployments.stages.process_setup import end_startup
from raylens.deployments.stages.stage_calls import StageCalls, StageError, StageFailedError, StageHandles
from raylens.deployments.wire.private_port import PortAddress, PrivatePort, Reader, Writer
from raylens.deployments.wire.stage_messages import Heartbeat
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

_REPORT_SECONDS = 0.5
_MAX_NAMES = 65_536
"""Names (`uuid`) of items, over all shards. Each takes some 200 bytes."""


class NamedContents:
    """Maps the names (`uuid`) that each tenant gave to items to content hashes. An LRU of `max_names` names.

    A name stands for content and is never a cache key, so a client cannot get another tenant's data by its name."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._hashes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def remember(self, cache_salt: str, name: str, hashed_content: str) -> None:
        self._hashes[cache_salt, name] = hashed_content
        self._hashes.move_to_end((cache_salt, name))
        while len(self._hashes) > self._max_names:
            self._hashes.popitem(last=False)

    def find(self, cache_salt: str, name: str) -> str | None:
        """Returns the hash of the tenant's latest content under the name, None if unknown."""
        found = self._hashes.get((cache_salt, name))
        if found is not None:
            self._hashes.move_to_end((cache_salt, name))
        return found


class SharedState(Replica):
    """Shard `number`. An ingress may call the methods in `methods`."""

    def __init__(self, config: AppConfig, number: int, stages: Mapping[str, StageHandles]) -> None:
        """`stages`: those of each model, by their name suffix, see `AppConfig.by_suffix`."""
        self._spans = spans = start_replica("shared", config)
        for own in stages.values():
            route_on_this_loop(own.preprocess, *own.encoders.values())
        self._metrics = ItemMetrics()
        calls = StageCalls(self._metrics.items_recomputed)
        self.maker = ItemMaker(config.shared, stages, calls, self._metrics, spans)
        self.names = NamedContents(_MAX_NAMES // config.shared.shards)
        self._uploads = Uploads(config.uploads, config.media.limits, shard=number, num_shards=config.shared.shards)
        self._responses = StoredResponses(config.responses, shard=number, num_shards=config.shared.shards)
        self._in_work = ResponsesInWork()
        self._batches = Batches(config.uploads, self._uploads, shard=number, num_shards=config.shared.shards)
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "find_name": self._find_name,
            "add_file": self._add_file,
            "files": self._uploads.all,
            "file": self._uploads.get,
            "read_file": self._read_file,
            "delete_file": self._uploads.delete,
            "store_response": self._store_response,
            "read_response": self._read_response,
            "read_conversation": self._read_conversation,
            "delete_response": self._responses.delete,
            "until_cancelled": self._in_work.until_cancelled,
            "cancel_response": self._in_work.cancel,
            "is_in_work": self._in_work.has,
            "create_batch": self._batches.create,
            "batch": self._batches.describe,
            "batches": self._batches.describe_all,
            "cancel_batch": self._batches.cancel,
            "next_batch": self._batches.next,
            "hold_batch": self._batches.hold,
            "outline_batch": self._outline_batch,
            "begin_batch": self._batches.begin,
            "add_answer": self._add_answer,
            "fail_batch": self._batches.fail,
        }
        self._port = PrivatePort(lambda reader, writer: _IngressConnection(self, reader, writer).serve())
        loop = asyncio.get_running_loop()
        self._opened = loop.create_task(self._port.open())
        self._reporter = loop.create_task(self._report_forever())
        end_startup()

    async def address(self) -> PortAddress:
        """Returns the address for ingress connections."""
        await self._opened
        return self._port.address

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    async def _find_name(self, tenant: str, name: str) -> str | None:
        return self.names.find(tenant, name)

    async def _add_file(
        self, tenant: str, filename: str, purpose: str, content: bytes | PackedReference, max_age_s: float | None
    ) -> Upload:
        return await self._uploads.add(tenant, filename, purpose, await received(content), max_age_s=max_age_s)

    async def _read_file(self, tenant: str, file_id: str) -> bytes | ObjectRef:
        return await stored(await self._uploads.read(tenant, file_id))

    async def _store_response(
        self, tenant: str, response_id: str, previous_id: str, content: bytes | PackedReference
    ) -> None:
        await self._responses.store(tenant, response_id, previous_id, await received(content))

    async def _read_response(self, tenant: str, response_id: str) -> bytes | ObjectRef:
        return await stored(await self._responses.read(tenant, response_id))

    async def _read_conversation(self, tenant: str, response_id: str, max_bytes: int) -> bytes | ObjectRef:
        return await stored(await self._responses.conversation(tenant, response_id, max_bytes))

    async def _outline_batch(self, tenant: str, batch_id: str) -> bytes | ObjectRef:
        return await stored(await self._batches.outline(tenant, batch_id))

    async def _add_answer(
        self, tenant: str, batch_id: str, custom_id: str, is_error: bool, line: bytes | PackedReference
    ) -> None:
        await self._batches.add(tenant, batch_id, custom_id, is_error, await received(line))

    async def _report_forever(self) -> None:
        while True:
            metrics, maker = self._metrics, self.maker
            metrics.mm_cache.report(maker.processed)
            metrics.encoder_cache.report(maker.embeddings)
            metrics.items_in_progress.set(maker.processed.num_pending + maker.embeddings.num_pending)
            metrics.uploads_files.set(self._uploads.num_files)
            metrics.uploads_bytes.set(self._uploads.num_bytes)
            await asyncio.sleep(_REPORT_SECONDS)


class _IngressConnection:
    """The connection of one ingress. Keeps the data of open orders and calls until they are closed or the connection is
    lost."""

    def __init__(self, state: SharedState, reader: Reader, writer: Writer) -> None:
        self._state = state
        self._reader = reader
        self._writer = writer
        self._work: dict[int, _Work] = {}

    async def serve(self) -> None:
        try:
            while True:
                self._take(await read(self._reader, FROM_INGRESS))
        finally:
            for number in list(self._work):
                self._work.pop(number).close()

    def _take(self, message: FromIngress) -> None:
        match message:
            case Ask(number) | CallMethod(number):
                self._work[number] = _Work(self._state, message, self._send)
            case Close(number) if number in self._work:
                self._work.pop(number).close()
            case Evict(mm_hash, lost):
                self._state.maker.evict(mm_hash, lost)
            case Remember(tenant, name, hashed_content):
                self._state.names.remember(tenant, name, hashed_content)

    def _send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))


class _Work:
    """An open order or call of an ingress."""

    def __init__(self, state: SharedState, message: Ask | CallMethod, send: Callable[[Message], None]) -> None:
        self._state = state
        self._message = message
        self._send = send
        self._told: StoredItem | None = None
        self._kept: list[object] = []
        """The answers so far; their references keep the data alive."""
        self._task = asyncio.create_task(self._answer())

    def close(self) -> None:
        self._task.cancel()
        self._kept.clear()

    async def _answer(self) -> None:
        number = self._message.number
        try:
            result = await self._result()
        except Exception as error:
            if not isinstance(error, InvalidRequestError | StageError | ContentMissingError):
                logger.exception("a %s failed", self._message)
                error = StageFailedError("shared", "the shared state failed")
            self._send(Failed(number, error))
            return
        self._kept.append(result)
        if isinstance(result, MadeItem):
            is_told = self._told is not None and self._told.ref == result.stored.ref
            self._send(Made(number, None if is_told else result.stored.shared, result.trace))
        else:
            self._send(Result(number, sent(result)))

    async def _result(self) -> Any:
        match self._message:
            case Ask(_, True, order):
                return await self._state.maker.embeddings_of(order, self._tell)
            case Ask(_, False, order):
                return await self._state.maker.processed_of(order)
            case CallMethod(_, method, arguments):
                return await self._state.methods[method](*arguments)

    def _tell(self, item: StoredItem) -> None:
        self._told = item
        self._kept.append(item)
        self._send(Pending(self._message.number, item.shared))
