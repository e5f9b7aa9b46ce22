"""Measures the parts of the engine's steps."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

StepPart = Literal["schedule", "model", "sample", "other"]
"""The phases of a step: scheduling, the model's forward pass, choosing tokens, and all the rest."""


class StepClock:
    """The number of steps so far, and the seconds of each of their parts between `start` and `end`. A GPU computes
    asynchronously, so `sample`, which reads its results, includes the wait for the model."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.started = 0.0
        """The time of the last `start`, in seconds of `time.perf_counter`."""
        self._last_read = 0.0
        self._seconds = dict.fromkeys(get_args(StepPart), 0.0)
        self._in_parts = 0.0

    def start(self) -> None:
        self._in_parts = 0.0
        self.started = time.perf_counter()

    @contextmanager
    def part(self, name: StepPart) -> Iterator[None]:
        """Counts the block as a part of the started step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] += seconds
            self._in_parts += seconds

    def end(self) -> None:
        self._seconds["other"] += time.perf_counter() - self.started - self._in_parts

    def note_read(self, launched_at: float) -> float:
        """Counts a step that has been read. Returns its seconds: since its launch, or since the read of the previous
        step if that is later."""
        now = time.perf_counter()
        seconds = now - max(launched_at, self._last_read)
        self._last_read = now
        self.num_steps += 1
        return seconds

    @property
    def seconds(self) -> Mapping[StepPart, float]:
        return dict(self._seconds)
