"""The ingress' end of the connections over which replicas of Generate send the pieces of answers."""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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

    def call(self, start: StartCall, tenant: str, news: asyncio.Event) -> "AnswerStream":
        """Returns the answers of the call that `start` makes to Generate with the given address. `news`: set when
        anything about them changes."""
        number = next(self._numbers)
        response = start(PieceAddress(self._port.address, number))
        turn = partial(self._turns.take, tenant)
        self._calls[number] = AnswerStream(response, news, turn, on_close=lambda: self._calls.pop(number))
        return self._calls[number]

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
                self._calls[number].lose("the connection to the replica is lost")


class AnswerStream:
    """The pieces of one call to Generate. Pieces of an answer that are ready together become one."""

    def __init__(
        self,
        response: DeploymentResponse[Any],
        news: asyncio.Event,
        turn: Callable[[int], Awaitable[None]],
        on_close: Callable[[], Any],
    ) -> None:
        """`turn(num_bytes)` waits until this many bytes of pieces may be read."""
        self._response = response
        self._call = asyncio.ensure_future(response)
        self._call.add_done_callback(self._end)
        self._news = news
        self._turn = turn
        self._on_close = on_close
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._has_ended = False
        self._loss = ""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, packed: Sequence[bytes], *, is_last: bool) -> None:
        self._waiting.extend(packed)
        self._num_waiting_bytes += sum(map(len, packed))
        self._has_ended = is_last
        if self._timer is not None:
            self._start_timer()
        self._news.set()

    def lose(self, reason: str) -> None:
        """No more pieces come."""
        self._loss = reason
        self._news.set()

    @property
    def is_ready(self) -> bool:
        """Whether pieces have come, or all have been read."""
        return bool(self._waiting) or self._has_ended

    def check(self) -> None:
        """Raises the call's own error, and PiecesLostError if no more pieces come."""
        if self._loss:
            raise PiecesLostError(self._loss)
        if self._call.done():
            self._call.result()

    async def next(self) -> list[GeneratedText]:
        """Waits for pieces, and returns up to a batch of them at the tenant's turn; none after the last. Raises like
        `check`."""
        while not self.is_ready:
            self.check()
            self._news.clear()
            await self._news.wait()
        await self._turn(min(_BATCH_BYTES, self._num_waiting_bytes))
        pieces, end = list[GeneratedText](), self._num_waiting_bytes - _BATCH_BYTES
        while self._waiting and self._num_waiting_bytes > end:
            packed = self._waiting.popleft()
            self._num_waiting_bytes -= len(packed)
            pieces.append(unpack_piece(packed))
        return joined(pieces)

    def close(self) -> None:
        """Ends the call if its pieces have not all come."""
        self._on_close()
        if self._timer is not None:
            self._timer.cancel()
        if not self._has_ended and not self._call.done():
            with suppress(Exception):  # the reason, if the call never reached a replica
                cancel_call(self._response)

    def _end(self, call: "asyncio.Future[Any]") -> None:
        if not call.cancelled() and call.exception() is None and not self._has_ended:
            self._start_timer()
        self._news.set()

    def _start_timer(self) -> None:
        """Expects the next pieces within `_LATE_SECONDS`, because the call has ended."""
        if self._timer is not None:
            self._timer.cancel()
        reason = f"no pieces for {_LATE_SECONDS} s after their call had ended"
        self._timer = asyncio.get_running_loop().call_later(_LATE_SECONDS, self.lose, reason)


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
        thought="".join(piece.thought for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        times=[time for piece in pieces for time in piece.times],
        logprobs=[token for piece in pieces for token in piece.logprobs],
        prompt_logprobs=[token for piece in pieces for token in piece.prompt_logprobs],
    )
