"""Sends the answers of one Generate call to the calling ingress, piece by piece."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raylens.deployments.wire.piece_connection import PieceConnection
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.preprocess.schema import StageTime

if TYPE_CHECKING:
    from raylens.llm.outputs import RequestOutput


class AnswerSender:
    """Sends the `num_answers` answers of call `number`. `pieces_of` converts the engine's outputs to pieces.

    `first_times` returns the stage times to send with the first piece. `record` makes spans of each piece's stage
    times.
    """

    def __init__(
        self,
        connection: PieceConnection,
        number: int,
        num_answers: int,
        pieces_of: "Callable[[Sequence[RequestOutput]], list[GeneratedText]]",
        first_times: Callable[[], Sequence[StageTime]],
        record: Callable[[Sequence[StageTime]], None],
    ) -> None:
        self._connection = connection
        self._number = number
        self._num_unfinished = num_answers
        self._pieces_of = pieces_of
        self._first_times: Callable[[], Sequence[StageTime]] | None = first_times
        self._record = record

    def receive(self, outputs: "list[RequestOutput]") -> bool:
        """Sends the pieces of the engine's next `outputs`. Returns whether all answers have ended. Raises an output's
        error, and PiecesLostError."""
        for output in outputs:
            if output.error is not None:
                raise output.error
        pieces = self._pieces_of(outputs)
        if self._first_times is not None:
            pieces[0].times.extend(self._first_times())
            self._first_times = None
        known: list[StageTime] = []
        for piece in pieces:
            known += piece.times
            self._num_unfinished -= piece.finish_reason is not None
        is_last = self._num_unfinished == 0
        self._connection.send(self._number, pieces, is_last=is_last)
        if known:
            self._record(known)  # after sending, off the critical path
        return is_last
