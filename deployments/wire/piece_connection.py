"""Carries answers from Generate to the calling ingress: one connection for the pieces of all streams.

The ingress listens and sends its address with each Generate call. A replica connects at the first call, and sends one
message after each engine step. One Ray call per piece would cost as much CPU time as the model.
`deployments/pipeline/piece_receiver.py` is the receiving end."""

import asyncio
from dataclasses import dataclass

from raylens.deployments.wire.piece_messages import SentPieces, pack_message, pack_piece
from raylens.deployments.wire.private_port import PortAddress, connect
from raylens.deployments.wire.stage_messages import GeneratedText

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PieceAddress:
    """Destination of one call's pieces. `number` identifies the call within its ingress."""

    ingress: PortAddress
    number: int


class PiecesLostError(RuntimeError):
    """The connection to the ingress is gone, with any unsent pieces."""


class PieceConnections:
    """A replica's connections, one per calling ingress. Use it on one event loop."""

    def __init__(self) -> None:
        self._open: dict[PortAddress, PieceConnection] = {}

    async def to(self, ingress: PortAddress) -> "PieceConnection":
        """Returns the connection to an ingress. Raises PiecesLostError if the ingress is unreachable."""
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
    """A connection to one ingress. Pieces sent while it is busy share the next message."""

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
        """Waits until the connection is open. Raises PiecesLostError if it fails."""
        await asyncio.shield(self._connected)

    def send(self, number: int, pieces: list[GeneratedText], *, is_last: bool) -> None:
        """Sends pieces of call `number`. `is_last`: none follow. Raises PiecesLostError if the connection is gone."""
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
        await reader.read()  # the ingress never sends data
        raise ConnectionError("the ingress has closed the connection")

    async def _write_forever(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            waiting, self._waiting = self._waiting, []
            writer.write(pack_message(waiting))
            await writer.drain()  # a slow ingress gets larger messages

    def _end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if not self._connected.done():
            self._connected.set_exception(PiecesLostError(f"the ingress cannot be reached: {failure!r}"))
            self._connected.exception()  # marks the exception as retrieved
