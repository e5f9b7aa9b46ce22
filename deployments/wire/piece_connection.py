"""The way of answers from Generate to the ingress that asked: one connection carries the pieces of all their streams.

The ingress listens, and tells its address with each call of Generate. A replica connects to it at the first call and
then sends, after each step of its engine, one message with all that the step gave. A call of Ray for each piece would
take as much of the processor as the model's own work on it. `deployments/pipeline/piece_receiver.py` is the other end.
"""

import asyncio
from dataclasses import dataclass

from raylens.deployments.wire.piece_messages import SentPieces, pack_message, pack_piece
from raylens.deployments.wire.private_port import PortAddress, connect
from raylens.deployments.wire.stage_messages import GeneratedText

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PieceAddress:
    """Where the pieces of one call go. `number` names the call among all calls of its ingress."""

    ingress: PortAddress
    number: int


class PiecesLostError(RuntimeError):
    """The connection to the ingress is gone, and pieces with it."""


class PieceConnections:
    """A replica's connections, one to each ingress that has called. Use it on one event loop."""

    def __init__(self) -> None:
        self._open: dict[PortAddress, PieceConnection] = {}

    async def to(self, ingress: PortAddress) -> "PieceConnection":
        """Returns the connection to an ingress. Raises PiecesLostError if it cannot be reached."""
        connection = self._open.get(ingress)
        if connection is None or connection.is_lost:
            self._open = {address: one for address, one in self._open.items() if not one.is_lost}
            connection = self._open[ingress] = PieceConnection(ingress)
        await connection.connected()
        return connection

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


class PieceConnection:
    """A connection to one ingress. Pieces sent while it is busy go together in the next message."""

    def __init__(self, address: PortAddress) -> None:
        self._waiting: list[SentPieces] = []
        self._has_waiting = asyncio.Event()
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(address))
        self._task.add_done_callback(self._end)

    @property
    def is_lost(self) -> bool:
        return self._task.done()

    async def connected(self) -> None:
        """Waits until pieces can be sent. Raises PiecesLostError if that cannot be."""
        await asyncio.shield(self._connected)

    def send(self, number: int, pieces: list[GeneratedText], *, is_last: bool) -> None:
        """Sends pieces of call `number`, of which `is_last` says that none follow. Raises PiecesLostError if the
        connection is gone."""
        if self.is_lost:
            raise PiecesLostError("the connection to the ingress is gone")
        self._waiting.append((number, list(map(pack_piece, pieces)), is_last))
        self._has_waiting.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self, address: PortAddress) -> None:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await connect(address)
        try:
            self._connected.set_result(None)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._notice_end(reader))
                group.create_task(self._write_forever(writer))
        finally:
            writer.close()

    async def _notice_end(self, reader: asyncio.StreamReader) -> None:
        """Raises ConnectionError when the ingress closes the connection, which never sends anything."""
        await reader.read()
        raise ConnectionError("the ingress has closed the connection")

    async def _write_forever(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            waiting, self._waiting = self._waiting, []
            writer.write(pack_message(waiting))
            await writer.drain()  # an ingress that falls behind gets more at once

    def _end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if not self._connected.done():
            self._connected.set_exception(PiecesLostError(f"the ingress cannot be reached: {failure!r}"))
            self._connected.exception()  # nobody may wait for it
