"""One request on its way through the simulated pipeline."""

from dataclasses import dataclass, field

from raylens.planning.load import Arrival

NOT_YET = -1.0


@dataclass(slots=True, eq=False)
class RequestRun:
    """What has become of a request so far. Moments are in seconds of the simulation, or NOT_YET."""

    arrival: Arrival
    ingress: int
    prompt_tokens: int
    """Of text and of pictures."""
    on_path_share: float
    wait_seconds: float
    num_pictures_missing: int = field(init=False)
    num_computed_tokens: int = 0
    """Of the prompt, by the language engine."""
    num_generated: int = 0
    num_delivered: int = 0
    first_token: float = NOT_YET
    last_token: float = NOT_YET

    def __post_init__(self) -> None:
        self.num_pictures_missing = len(self.arrival.pictures)

    @property
    def num_lacking(self) -> int:
        """Returns how many tokens of the prompt are still to be computed."""
        return self.prompt_tokens - self.num_computed_tokens

    @property
    def is_done(self) -> bool:
        return self.last_token != NOT_YET

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrival.moment

    @property
    def time_per_output_token(self) -> float | None:
        """Returns the mean seconds from one token to the next, None for an answer of one token."""
        count = self.arrival.answer_tokens
        return (self.last_token - self.first_token) / (count - 1) if count > 1 else None

    def deliver(self, num_tokens: int, now: float) -> None:
        """Notes that the client has got so many further tokens."""
        if self.num_delivered == 0:
            self.first_token = now
        self.num_delivered += num_tokens
        if self.num_delivered == self.arrival.answer_tokens:
            self.last_token = now
