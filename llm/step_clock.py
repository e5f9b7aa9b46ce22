"""How long the parts of the engine's steps take."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

StepPart = Literal["schedule", "model", "sample", "other"]
"""What a step is divided into: choosing what runs, the model's forward pass, choosing tokens, and all the rest."""


class StepClock:
    """The number of steps since the start, and the seconds that each part of them took. A GPU computes while the other
    parts go on, so there `sample`, which reads its results, includes the wait for the model."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        """Of the last step."""
        self._seconds = dict.fromkeys(get_args(StepPart), 0.0)
        self._started = 0.0
        self._in_parts = 0.0

    def start(self) -> None:
        self._in_parts = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: StepPart) -> Iterator[None]:
        """Counts the block as a part of the step that has been started."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] += seconds
            self._in_parts += seconds

    def end(self) -> None:
        self.step_seconds = time.perf_counter() - self._started
        self._seconds["other"] += self.step_seconds - self._in_parts
        self.num_steps += 1

    @property
    def seconds(self) -> Mapping[StepPart, float]:
        return dict(self._seconds)
