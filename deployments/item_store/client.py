"""This ingress's connections to the shards of the shared state.

All ingresses rank the shards identically for a key, so they ask the same shard for the same item."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from raylens.deployments.item_store.codec import pack, read
from raylens.deployments.item_store.item_states import SharedItem
from raylens.deployments.item_store.messages import (
    FROM_SHARD,
    Close,
    Failed,
    FromIngress,
    FromShard,
    Made,
    Pending,
    Result,
)
from raylens.deployments.routing.replica_choice import rank
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.deployments.wire.private_port import MalformedMessageError, PortAddress, Reader, Writer, connect

logger = logging.getLogger(f"ray.serve.{__name__}")

_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_AWAY_SECONDS = 10.0
"""How long a request waits for a lost shard to return."""


OnPending = Callable[[SharedItem], None]
"""See `item_states.OnPending`."""


class ShardLostError(Exception):
    """The connection to a shard ended before its answer arrived."""


class Shards:
    """The connections to all shards. `handles`: one deployment handle per shard, in order. Use it on one event loop."""

    def __init__(self, handles: Sequence[DeploymentHandle[Any]]) -> None:
        self._handles = {str(number): handle for number, handle in enumerate(handles)}
        self._connections: dict[str, ShardConnection] = {}
        self._has_connection = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Starts to keep a connection to each shard."""
        self._tasks = [asyncio.create_task(self._keep_connected(shard)) for shard in self._handles]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def nearest(self, key: str) -> "ShardConnection":
        """Returns the connection to the first reachable shard in the key's ranking. Raises StageUnavailableError if no
        shard returns in time."""
        return await self._present(lambda: self._nearest(key))

    async def owner(self, key: str) -> "ShardConnection":
        """Returns the connection to the first shard in the key's ranking, for state that only this shard holds. Raises
        StageUnavailableError if the shard does not return in time."""
        return await self.shard(rank(key, self._handles)[0])

    @property
    def names(self) -> list[str]:
        return list(self._handles)

    async def shard(self, name: str) -> "ShardConnection":
        """Returns the connection to this shard. Raises StageUnavailableError if it does not return in time."""
        return await self._present(lambda: self._connections.get(name))

    def send(self, key: str, message: FromIngress) -> None:
        """Sends to the nearest shard; drops the message if no shard is reachable."""
        if (connection := self._nearest(key)) is not None:
            connection.send(message)

    def send_to_all(self, message: FromIngress) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _nearest(self, key: str) -> "ShardConnection | None":
        ranked = rank(key, self._connections)
        return self._connections[ranked[0]] if ranked else None

    async def _present(self, find: Callable[[], "ShardConnection | None"]) -> "ShardConnection":
        if (connection := find()) is not None:
            return connection
        with suppress(TimeoutError):
            async with asyncio.timeout(_AWAY_SECONDS):
                while (connection := find()) is None:
                    self._has_connection.clear()
                    await self._has_connection.wait()
                return connection
        raise unavailable()

    async def _keep_connected(self, shard: str) -> None:
        while True:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    address: PortAddress = await self._handles[shard].address.remote()
                    reader, writer = await connect(address)
            except Exception:  # the shard is unreachable, for any reason
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            connection = self._connections[shard] = ShardConnection(shard, writer)
            self._has_connection.set()
            try:
                await connection.run(reader)
            finally:
                del self._connections[shard]
            await asyncio.sleep(_PAUSE_SECONDS)


@dataclass(slots=True)
class _Open:
    """An order or call without its result. `item`: as last described while pending."""

    answer: asyncio.Future[Any]
    on_pending: OnPending
    item: SharedItem | None = None


class ShardConnection:
    """A connection to one shard, with its open orders and calls."""

    def __init__(self, shard: str, writer: Writer) -> None:
        self._shard = shard
        self._writer = writer
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}

    async def run(self, reader: Reader) -> None:
        """Dispatches the shard's messages. Returns when the connection is lost or invalid."""
        try:
            while True:
                self._take(await read(reader, FROM_SHARD))
        except (OSError, asyncio.IncompleteReadError):
            pass
        except MalformedMessageError as error:
            logger.error("closed the connection to shard %s: %s", self._shard, error)
        except Exception:
            logger.exception("closed the connection to shard %s, after an error", self._shard)
        finally:
            self._writer.close()
            for one in self._open.values():
                if not one.answer.done():
                    one.answer.set_exception(ShardLostError(f"shard {self._shard} is lost"))

    def send(self, message: FromIngress) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    async def ask(
        self, message: Callable[[int], FromIngress], pins: ExitStack, on_pending: OnPending = lambda pending: None
    ) -> Any:
        """Sends `message(number)` and returns its result: for an order, a SharedItem and an ItemTrace. The shard keeps
        the referenced data until `pins` is closed. Raises the shard's error, or ShardLostError."""
        number = next(self._numbers)
        pins.callback(self.send, Close(number))
        one = self._open[number] = _Open(asyncio.get_running_loop().create_future(), on_pending)
        try:
            self.send(message(number))
            return await one.answer
        finally:
            del self._open[number]

    def _take(self, message: FromShard) -> None:
        one = self._open.get(message.number)
        if one is None or one.answer.done():  # its request has left
            return
        match message:
            case Pending(_, item):
                one.item = item
                one.on_pending(item)
            case Made(_, item, trace):
                if (made := item or one.item) is None:
                    raise MalformedMessageError("an order is made whose item was never described")
                one.answer.set_result((made, trace))
            case Result(_, value):
                one.answer.set_result(value)
            case Failed(_, error):
                one.answer.set_exception(error)


def unavailable() -> StageUnavailableError:
    return StageUnavailableError("shared", "what the replicas of the endpoint share is not available")
