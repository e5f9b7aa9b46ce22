"""Chooses how many threads a step on the CPU uses that only decodes, by what was fastest lately.

Such a step waits for memory. Another thread helps while its core is idle. It does harm when the core is busy: the step
then waits until the thread has finished what it has begun.
"""

_PERIOD = 16
"""Every so many decoding steps, one is tried with another number of threads."""
_WEIGHT = 0.3
"""Of the latest trial, in the moving average."""
_GAIN = 0.95
"""How long a step may take with another number of threads, compared with the present one, for the number to change."""


class StepThreads:
    """The number of threads of decoding steps: 1, 2, 4 and so on, up to `max_threads`."""

    def __init__(self, max_threads: int) -> None:
        powers = (1 << power for power in range(max_threads.bit_length()))
        self._numbers = [*(number for number in powers if number < max_threads), max_threads]
        self._present = 0
        self._tried = 0
        self._ratios = [1.0] * len(self._numbers)
        self._num_steps = 0
        self._last: tuple[int, float] | None = None

    @property
    def most(self) -> int:
        return self._numbers[-1]

    def next_number(self) -> int:
        """Returns the number for the next step, if that only decodes. Tell `note` how long it took."""
        if len(self._numbers) == 1:
            return 1
        self._num_steps += 1
        self._tried = self._present if self._num_steps % _PERIOD else self._neighbour(self._num_steps // _PERIOD)
        return self._numbers[self._tried]

    def note(self, num_rows: int, seconds: float) -> None:
        """Takes how long the last step took, which decoded so many rows. A trial counts if the step before it had as
        many."""
        if self._tried == self._present:
            self._last = (num_rows, seconds)
        elif self._last is not None and self._last[0] == num_rows:
            ratio = self._ratios[self._tried]
            ratio = self._ratios[self._tried] = ratio + _WEIGHT * (seconds / self._last[1] - ratio)
            if ratio < _GAIN:
                self._present = self._tried
                self._ratios = [1.0] * len(self._numbers)

    def _neighbour(self, trial: int) -> int:
        """Returns the next higher or the next lower number's index, in turns where there are both."""
        others = [index for index in (self._present + 1, self._present - 1) if 0 <= index < len(self._numbers)]
        return others[trial % len(others)]
