"""The clock of a simulation: what happens next, in order of time, and of submission where times are equal."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventLoop:
    """Runs actions at their simulated moments. `now` is in seconds from the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Action]] = []
        self._num_added = 0

    def at(self, moment: float, action: Action) -> None:
        """Runs `action` at `moment`, or now if that is past."""
        self._num_added += 1
        heapq.heappush(self._queue, (max(moment, self.now), self._num_added, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Runs until nothing is left, or until `may_go_on` is false."""
        while self._queue and may_go_on():
            self.now, _, action = heapq.heappop(self._queue)
            self.num_events += 1
            action()
