"""The answers of calls on their way from the engine's outputs to the connection of their ingress."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from raylens.deployments.stages.engine_loop import EngineLoop
from raylens.deployments.stages.pieces import AnswerSender
from raylens.deployments.wire.piece_connection import PieceConnections, PiecesLostError
from raylens.deployments.wire.piece_messages import SentPieces, read_message
from raylens.deployments.wire.private_port import PrivatePort, Reader, Writer
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.outputs import RequestOutput
from raylens.llm.sequence import FinishReason, SequenceTimes
from raylens.preprocess.schema import InvalidRequestError, StageTime
from tests.waiting import until


def output(request_id: str, *, index: int = 0, is_last: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if is_last else None
    return RequestOutput(request_id, index, [7], (), (), 1, 0, 1, reason, False, SequenceTimes())


def pieces_of(outputs: Sequence[RequestOutput]) -> list[GeneratedText]:
    return [
        GeneratedText("x", one.token_ids, 1, 0, 1, one.finish_reason and one.finish_reason.value, [], one.index)
        for one in outputs
    ]


class OneStepEngine:
    """Ends all requests in one step, when there are as many as are expected."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self.request_ids: list[str] = []

    def step(self) -> list[RequestOutput]:
        ended, self.request_ids = self.request_ids, []
        return [output(request_id, is_last=True) for request_id in ended]

    def abort(self, request_id: str) -> None:
        """All have ended."""

    @property
    def is_idle(self) -> bool:
        return len(self.request_ids) < self._num_requests


async def test_one_message_brings_an_ingress_all_that_a_step_gave() -> None:
    messages: list[list[SentPieces]] = []

    async def receive(reader: Reader, _: Writer) -> None:
        while True:
            messages.append(await read_message(reader))

    port = PrivatePort(receive)
    await port.open()
    connections = PieceConnections()
    connection = await connections.to(port.address)
    engine = OneStepEngine(5)
    loop: EngineLoop[RequestOutput] = EngineLoop(engine, name="test", step_timeout_s=10)

    async def call(number: int) -> None:
        sender = AnswerSender(connection, number, 1, pieces_of, list, lambda _: None)
        await loop.run(str(number), lambda id_: engine.request_ids.append(id_), sender.receive)

    await asyncio.gather(*(call(number) for number in range(5)))
    await until(lambda: bool(messages))
    assert [[number for number, _, _ in message] for message in messages] == [[0, 1, 2, 3, 4]]
    assert loop.close()
    connections.close()
    await port.close()


class Sent:
    """Stands for a connection, and keeps what is sent."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self.sent: list[tuple[int, list[GeneratedText], bool]] = []
        self.recorded: list[list[str]] = []
        self._is_lost = is_lost

    def send(self, number: int, pieces: list[GeneratedText], *, is_last: bool) -> None:
        if self._is_lost:
            raise PiecesLostError
        self.sent.append((number, pieces, is_last))

    def sender(self, num_answers: int = 1) -> AnswerSender:
        def record(times: Sequence[StageTime]) -> None:
            self.recorded.append([one.stage for one in times])

        first_times = [StageTime("render", 0.0, 1.0)]
        connection: Any = self
        return AnswerSender(connection, 3, num_answers, pieces_of, lambda: first_times, record)


def test_a_call_ends_with_the_last_of_its_answers() -> None:
    sent = Sent()
    sender = sent.sender(num_answers=2)
    assert not sender.receive([output("a"), output("a", index=1)])
    assert not sender.receive([output("a", is_last=True), output("a", index=1)])
    assert sender.receive([output("a", index=1, is_last=True)])
    assert [(number, len(pieces), is_last) for number, pieces, is_last in sent.sent] == [
        (3, 2, False),
        (3, 2, False),
        (3, 1, True),
    ]


def test_the_first_piece_has_the_times_before_it() -> None:
    sent = Sent()
    sender = sent.sender()
    sender.receive([output("a")])
    sender.receive([output("a")])
    sender.receive([output("a", is_last=True)])
    stages = [[time.stage for piece in pieces for time in piece.times] for _, pieces, _ in sent.sent]
    assert stages == [["render"], [], []]
    assert [one for one in sent.recorded if one] == [["render"]]  # the call has a span of its own


def test_an_outputs_error_ends_the_call_and_nothing_is_sent() -> None:
    sent = Sent()
    failed = output("a")
    failed.error = InvalidRequestError("too long", field="prompt")
    with pytest.raises(InvalidRequestError, match="too long"):
        sent.sender().receive([output("a"), failed])
    assert not sent.sent


def test_a_lost_connection_ends_the_call() -> None:
    with pytest.raises(PiecesLostError):
        Sent(is_lost=True).sender().receive([output("a")])
