"""A simulated answer, and its tokens' path from the engine to the client."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from raylens.planning.cores import Process
from raylens.planning.costs import Work
from raylens.planning.load import Arrival


@dataclass(slots=True, eq=False)
class Answer:
    """The number of tokens that reached the client, and the times of the first and the latest one. `relay`: of the
    request's ingress."""

    arrival: Arrival
    relay: "TokenRelay"
    num_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0

    def add_token(self, now: float) -> None:
        self.first_token = self.first_token if self.num_tokens else now
        self.last_token = now
        self.num_tokens += 1

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrival.moment

    @property
    def time_per_output_token(self) -> float | None:
        """Returns the mean seconds between two tokens, None for an answer of one token."""
        count = self.arrival.answer_tokens
        return (self.last_token - self.first_token) / (count - 1) if count > 1 else None


class TokenRelay:
    """Passes tokens on. Each token is represented by its answer. Tokens that arrive while the process is busy are
    merged into one message."""

    def __init__(self, process: Process, work: Work, pass_on: Callable[[list[Answer]], None]) -> None:
        self._process = process
        self._work = work
        self._pass_on = pass_on
        self._gathered: list[Answer] = []

    def send(self, tokens: list[Answer]) -> None:
        message = self._gathered
        is_queued = bool(message)
        message += tokens  # before `submit`, which may begin at once
        if not is_queued:
            self._process.submit(partial(self._begin, message), partial(self._pass_on, message))

    def _begin(self, message: list[Answer]) -> float:
        self._gathered = []
        return self._work.seconds_per_message + self._work.seconds_per_piece * len(set(message))
