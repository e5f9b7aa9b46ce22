"""Chooses the number of threads of a decode-only step on the CPU: the one that was fastest lately.

Such a step is memory-bound. One more thread helps if its core is idle. It hurts if the core is busy, because the step
then waits for that thread."""

_PERIOD = 16
"""One in so many decode-only steps tries another number of threads."""
_WEIGHT = 0.3
"""Of the latest trial, in the moving average."""
_GAIN = 0.95
"""The number of threads changes if a step takes less than this fraction of its present time with another number."""


class StepThreads:
    """The number of threads of decoding steps: 1, 2, 4 and so on, up to `max_threads`, which the first steps get."""

    def __init__(self, max_threads: int) -> None:
        powers = (1 << power for power in range(max_threads.bit_length()))
        self._numbers = [*(number for number in powers if number < max_threads), max_threads]
        self.most = max_threads
        self._present = self._tried = len(self._numbers) - 1
        self._ratios = [1.0] * len(self._numbers)
        self._num_steps = 0
        self._last: tuple[int, float] | None = None

    def next_number(self) -> int:
        """Returns the number of threads for the next decode-only step. Report its duration to `note`."""
        if len(self._numbers) == 1:
            return 1
        self._num_steps += 1
        self._tried = self._present if self._num_steps % _PERIOD else self._neighbour(self._num_steps // _PERIOD)
        return self._numbers[self._tried]

    def note(self, num_rows: int, seconds: float) -> None:
        """Records a step of `num_rows` decoded rows. A trial counts if the previous step had as many rows."""
        if self._tried == self._present:
            self._last = (num_rows, seconds)
        elif self._last is not None and self._last[0] == num_rows:
            ratio = self._ratios[self._tried]
            ratio = self._ratios[self._tried] = ratio + _WEIGHT * (seconds / self._last[1] - ratio)
            if ratio < _GAIN:
                self._present = self._tried
                self._ratios = [1.0] * len(self._numbers)

    def _neighbour(self, trial: int) -> int:
        """Returns the index of the next higher or lower number, alternating if both exist."""
        others = [index for index in (self._present + 1, self._present - 1) if 0 <= index < len(self._numbers)]
        return others[trial % len(others)]
