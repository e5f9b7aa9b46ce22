"""The ingress' end of the connections over which replicas of Generate send the pieces of answers."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentResponse

from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.ray_internals.handles import cancel_call
from raylens.deployments.wire.piece_connection import PieceAddress, PiecesLostError
from raylens.deployments.wire.piece_messages import read_message, unpack_piece
from raylens.deployments.wire.private_port import PrivatePort, Reader, Writer
from raylens.deployments.wire.stage_messages import GeneratedText

_LATE_SECONDS = 10.0
"""How long pieces may arrive after their call ended."""
_BATCH_BYTES = 1024
"""Limit on packed pieces that are unpacked together: the amount that a tenant may read in one turn."""

StartCall = Callable[[PieceAddress], DeploymentResponse[Any]]


class PieceReceiver:
    """Receives the pieces of calls to Generate and gives them to their calls, in `turns` between tenants. Use it on one
    event loop."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._numbers = itertools.count()
        self._calls: dict[int, AnswerStream] = {}
        self._port = PrivatePort(self._receive)

    async def open(self) -> None:
        await self._port.open()

    async def close(self) -> None:
        """Ends all connections."""
        await self._port.close()

    def call(self, start: StartCall, tenant: str) -> "AnswerStream":
        """Returns the answers of the call that `start` makes to Generate with the given address. Reading the stream
        starts the call."""
        address = PieceAddress(self._port.address, next(self._numbers))
        return AnswerStream(address, start, self._calls, lambda cost: self._turns.take(tenant, cost))

    async def _receive(self, reader: Reader, _: Writer) -> None:
        seen: set[int] = set()
        try:
            while True:
                for number, packed, is_last in await read_message(reader):
                    if number in self._calls:  # else its client is gone
                        self._calls[number].put(packed, is_last=is_last)
                        seen.add(number)
                    if is_last:
                        seen.discard(number)
        finally:
            # The replica is gone. Ray may notice much later: a lost node only after seconds.
            for number in seen.intersection(self._calls):
                self._calls[number].lose()


class AnswerStream:
    """The pieces of one call to Generate, in lists. Pieces of an answer that are ready together become one."""

    def __init__(
        self,
        address: PieceAddress,
        start: StartCall,
        calls: "dict[int, AnswerStream]",
        turn: Callable[[int], Awaitable[None]],
    ) -> None:
        """`turn(num_bytes)` waits until this many bytes of pieces may be read."""
        self._address = address
        self._start = start
        self._calls = calls
        self._turn = turn
        self._response: DeploymentResponse[Any] | None = None
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._has_ended = self._is_lost = False
        self._news = asyncio.Event()

    def put(self, packed: Sequence[bytes], *, is_last: bool) -> None:
        self._waiting.extend(packed)
        self._num_waiting_bytes += sum(map(len, packed))
        self._has_ended = is_last
        self._news.set()

    def lose(self) -> None:
        """No more pieces come."""
        self._is_lost = True
        self._news.set()

    async def __aiter__(self) -> AsyncGenerator[list[GeneratedText]]:
        """Raises the call's own error, and PiecesLostError if the connection is lost, or if the call ends well but its
        pieces do not come."""
        self._calls[self._address.number] = self
        self._response = self._start(self._address)
        call = asyncio.ensure_future(self._response)
        call.add_done_callback(lambda _: self._news.set())
        try:
            while self._waiting or not self._has_ended:
                if self._waiting:
                    yield await self._next()
                elif self._is_lost:
                    raise PiecesLostError("the connection to the replica is lost")
                elif call.done():
                    call.result()
                    await self._wait(_LATE_SECONDS)
                else:
                    await self._wait(None)
        finally:
            del self._calls[self._address.number]
            call.add_done_callback(_read_failure)  # nothing else awaits the call after the last piece

    async def _next(self) -> list[GeneratedText]:
        """Returns up to a batch of the waiting pieces, at the tenant's turn."""
        await self._turn(min(_BATCH_BYTES, self._num_waiting_bytes))
        pieces, end = list[GeneratedText](), self._num_waiting_bytes - _BATCH_BYTES
        while self._waiting and self._num_waiting_bytes > end:
            packed = self._waiting.popleft()
            self._num_waiting_bytes -= len(packed)
            pieces.append(unpack_piece(packed))
        return joined(pieces)

    def cancel(self) -> None:
        """Ends the call, if it has begun."""
        if self._response is not None:
            cancel_call(self._response)

    async def _wait(self, seconds: float | None) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            raise PiecesLostError(f"no pieces for {seconds} s after their call had ended") from None


def joined(pieces: list[GeneratedText]) -> list[GeneratedText]:
    """Merges `pieces` into one for each answer."""
    if len(pieces) <= 1:
        return pieces
    of_answers: dict[int, list[GeneratedText]] = {}
    for piece in pieces:
        of_answers.setdefault(piece.index, []).append(piece)
    return [own[0] if len(own) == 1 else _join(own) for own in of_answers.values()]


def _join(pieces: list[GeneratedText]) -> GeneratedText:
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        times=[time for piece in pieces for time in piece.times],
        logprobs=[token for piece in pieces for token in piece.logprobs],
        prompt_logprobs=[token for piece in pieces for token in piece.prompt_logprobs],
    )


def _read_failure(call: "asyncio.Future[Any]") -> None:
    if not call.cancelled():
        call.exception()
