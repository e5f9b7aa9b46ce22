"""Pieces of answers on their way from a replica of Generate to the ingress, over real connections."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raylens.deployments.pipeline import piece_receiver
from raylens.deployments.pipeline.piece_receiver import AnswerStream, PieceReceiver, joined
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.wire import piece_connection
from raylens.deployments.wire.piece_connection import PieceAddress, PieceConnection, PieceConnections, PiecesLostError
from raylens.deployments.wire.piece_messages import SentPieces, pack_message
from raylens.deployments.wire.private_port import connect, frame
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken
from raylens.preprocess.schema import StageTime
from tests.waiting import until

Sends = Callable[[PieceConnection, int], Awaitable[None]]


def piece(text: str, *, index: int = 0, finish_reason: str | None = None) -> GeneratedText:
    return GeneratedText(text, [ord(one) for one in text], 5, 0, len(text), finish_reason, [], index)


class Replica:
    """Stands for a replica of Generate: each of its calls sends what `sends` says."""

    def __init__(self) -> None:
        self.connections = PieceConnections()
        self.cancelled: list[int] = []

    def call(self, receiver: PieceReceiver, sends: Sends, tenant: str = "") -> AnswerStream:
        return receiver.call(lambda address: self._response(address, sends), tenant, asyncio.Event())

    def _response(self, address: PieceAddress, sends: Sends) -> Any:
        async def run() -> None:
            await sends(await self.connections.to(address.ingress), address.number)

        return Response(run(), lambda: self.cancelled.append(address.number))


class Response:
    """As much of Serve's response as is used."""

    def __init__(self, work: Coroutine[Any, Any, None], on_cancel: Callable[[], None]) -> None:
        self._task = asyncio.ensure_future(work)
        self._on_cancel = on_cancel
        self._replica_result_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()
        self._on_cancel()


@asynccontextmanager
async def open_receiver() -> AsyncIterator[PieceReceiver]:
    receiver = PieceReceiver(Turns())
    await receiver.open()
    try:
        yield receiver
    finally:
        await receiver.close()


@pytest.fixture
async def receiver() -> AsyncIterator[PieceReceiver]:
    async with open_receiver() as one:
        yield one


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    one = Replica()
    yield one
    one.connections.close()


async def say_word_by_word(connection: PieceConnection, number: int) -> None:
    words = ["one ", "two ", "three"]
    for word in words:
        connection.send(number, [piece(word)], is_last=word == words[-1])
        await asyncio.sleep(0.01)


async def pieces_of(stream: AnswerStream) -> AsyncGenerator[list[GeneratedText]]:
    try:
        while pieces := await stream.next():
            yield pieces
    finally:
        stream.close()


async def text_of(stream: AnswerStream) -> str:
    return "".join([one.text async for pieces in pieces_of(stream) for one in pieces])


async def test_an_answer_comes_piece_by_piece(receiver: PieceReceiver, replica: Replica) -> None:
    stream = replica.call(receiver, say_word_by_word)
    assert [[one.text for one in pieces] async for pieces in pieces_of(stream)] == [["one "], ["two "], ["three"]]


async def test_all_streams_of_a_replica_share_one_connection_and_each_steps_message(
    receiver: PieceReceiver, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[list[SentPieces]] = []

    def pack_and_note(sent: list[SentPieces]) -> bytes:
        messages.append(sent)
        return pack_message(sent)

    monkeypatch.setattr(piece_connection, "pack_message", pack_and_note)
    steps = [asyncio.Event() for _ in range(3)]

    async def send(connection: PieceConnection, number: int) -> None:
        for step in steps:
            await step.wait()
            connection.send(number, [piece(f"{number} ")], is_last=step is steps[-1])

    answers = [asyncio.create_task(text_of(replica.call(receiver, send))) for _ in range(32)]
    await until(lambda: len(receiver._calls) == 32 and len(receiver._port._connections) == 1)
    for count, step in enumerate(steps, start=1):
        step.set()
        await until(lambda count=count: sum(map(len, messages)) == 32 * count)  # type: ignore[misc]
    texts = await asyncio.gather(*answers)
    assert texts == [f"{number} " * 3 for number in range(32)]
    assert len(messages) == 3


async def test_what_a_slow_client_has_not_taken_comes_in_batches(receiver: PieceReceiver, replica: Replica) -> None:
    """It holds up nobody, and stays packed until the client takes it."""
    words = [f"word{number} " for number in range(5000)]

    async def send(connection: PieceConnection, number: int) -> None:
        for word in words:
            connection.send(number, [piece(word)], is_last=word == words[-1])
            await asyncio.sleep(0)

    slow = replica.call(receiver, send)
    pieces = pieces_of(slow)
    found = [one.text for one in await anext(pieces)]
    assert await text_of(replica.call(receiver, say_word_by_word)) == "one two three"
    await until(lambda: slow._has_ended)
    sizes = list(map(len, slow._waiting))
    assert sum(sizes) == slow._num_waiting_bytes < 60 * len(words)
    found += [one.text async for pieces_ in pieces for one in pieces_]
    assert "".join(found) == "".join(words)
    assert 2 < len(found) <= 2 + sum(sizes) // piece_receiver._BATCH_BYTES


async def test_pieces_join_without_losing_anything() -> None:
    token = ScoredToken(1, b"a", -0.5, 1, [(1, b"a", -0.5)], 3)
    times = [StageTime("prefill", 1.0, 0.5, "Generate#1"), StageTime("first_decode", 1.5, 0.25, "Generate#1")]
    parts = [
        GeneratedText("a", [1], 9, 4, 1, None, [times[0]], 0, "why", 1, None, [], [token], [token, token]),
        GeneratedText("x", [7], 9, 4, 1, None, [], 1),
        GeneratedText("b", [2, 3], 9, 4, 3, "stop", [times[1]], 0, ".", 2, "\n", [], [token], []),
    ]
    expected = GeneratedText(
        "ab", [1, 2, 3], 9, 4, 3, "stop", times, 0, "why.", 2, "\n", [], [token, token], [token, token]
    )
    assert joined(parts) == [expected, parts[1]]


async def test_what_the_call_raises_ends_the_stream(receiver: PieceReceiver, replica: Replica) -> None:
    async def die(connection: PieceConnection, number: int) -> None:
        connection.send(number, [piece("begun")], is_last=False)
        await asyncio.sleep(0.01)
        raise ActorDiedError

    pieces = pieces_of(replica.call(receiver, die))
    assert [one.text for one in await anext(pieces)] == ["begun"]
    with pytest.raises(ActorDiedError):
        await anext(pieces)
    assert not receiver._calls


async def test_a_call_whose_last_pieces_are_lost_says_so(
    receiver: PieceReceiver, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_receiver, "_LATE_SECONDS", 0.05)

    async def send(connection: PieceConnection, number: int) -> None:
        connection.send(number, [piece("begun")], is_last=False)

    with pytest.raises(PiecesLostError, match="no pieces for 0.05 s after their call had ended"):
        await text_of(replica.call(receiver, send))


async def test_a_lost_connection_ends_what_it_has_carried_before_ray_hears_of_it(
    receiver: PieceReceiver, replica: Replica
) -> None:
    other = Replica()

    async def begin(connection: PieceConnection, number: int) -> None:
        connection.send(number, [piece("begun")], is_last=False)
        await asyncio.sleep(60)

    async def answer(connection: PieceConnection, number: int) -> None:
        await asyncio.sleep(0.1)
        connection.send(number, [piece("whole", finish_reason="stop")], is_last=True)

    lost, kept = pieces_of(replica.call(receiver, begin)), asyncio.create_task(text_of(other.call(receiver, answer)))
    await anext(lost)
    replica.connections.close()  # as the kernel does for a process that is killed
    with pytest.raises(PiecesLostError, match="the connection to the replica is lost"):
        await asyncio.wait_for(anext(lost), 5)
    assert await kept == "whole"


@pytest.mark.parametrize("body", [b"rubbish", b"\x91\x93\x91\x01\x90\xc2"], ids=["no message", "a number that is none"])
async def test_a_replica_that_sends_rubbish_is_disconnected_and_others_go_on(
    receiver: PieceReceiver, replica: Replica, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await connect(receiver._port.address)
    writer.write(frame(body))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert len([one for one in caplog.records if "closed the connection from" in one.message]) == 1
    assert await text_of(replica.call(receiver, say_word_by_word)) == "one two three"


async def test_pieces_that_come_after_their_call_has_ended_are_read(receiver: PieceReceiver, replica: Replica) -> None:
    async def send(connection: PieceConnection, number: int) -> None:
        later = asyncio.get_running_loop().call_later
        later(0.1, lambda: connection.send(number, [piece("late", finish_reason="stop")], is_last=True))

    assert await text_of(replica.call(receiver, send)) == "late"


async def test_who_leaves_gets_nothing_more_and_others_go_on(receiver: PieceReceiver, replica: Replica) -> None:
    async def send_for_ever(connection: PieceConnection, number: int) -> None:
        while True:
            connection.send(number, [piece("on ")], is_last=False)
            await asyncio.sleep(0.001)

    leaving = replica.call(receiver, send_for_ever)
    await leaving.next()
    leaving.close()
    assert replica.cancelled == [0]
    assert not receiver._calls
    assert await text_of(replica.call(receiver, say_word_by_word)) == "one two three"


async def test_a_replica_that_loses_the_ingress_stops_and_the_next_ingress_gets_a_connection(replica: Replica) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send_for_ever(connection: PieceConnection, number: int) -> None:
        try:
            while True:
                connection.send(number, [piece("on ")], is_last=False)
                await asyncio.sleep(0.01)
        except PiecesLostError as error:
            ended.set_result(str(error))

    async with open_receiver() as first:
        stream = replica.call(first, send_for_ever)
        await stream.next()
    with pytest.raises(PiecesLostError, match="the connection to the replica is lost"):
        await asyncio.wait_for(stream.next(), 5)
    assert await asyncio.wait_for(ended, 5) == "the connection to the ingress is gone"
    async with open_receiver() as second:
        assert await text_of(replica.call(second, say_word_by_word)) == "one two three"
    await until(lambda: all(one.is_lost for one in replica.connections._open.values()))


async def test_an_ingress_that_cannot_be_reached_is_an_error(replica: Replica) -> None:
    async with open_receiver() as receiver:
        address = receiver._port.address
    for _ in range(2):
        with pytest.raises(PiecesLostError, match="the ingress cannot be reached"):
            await replica.connections.to(address)
