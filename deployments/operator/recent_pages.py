"""The pages of the last seconds. Views show the growth from the oldest to the newest, so that it moves steadily."""

from collections import deque

from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.snapshot import Snapshot
from raylens.deployments.operator.summarize import summarize

WINDOW_SECONDS = 10.0


class RecentPages:
    """Keeps the pages that the last `window_s` seconds need."""

    def __init__(self, window_s: float = WINDOW_SECONDS) -> None:
        self._window_s = window_s
        self._pages: deque[tuple[float, MetricsPage]] = deque()

    def add(self, page: MetricsPage, now: float) -> Snapshot | None:
        """Returns what happened since the last page that is at least the window older, or since the oldest one. None if
        there is none, or if nobody read pages for twice the window. `now`: when the page was read, in seconds of a
        clock that only goes on."""
        while len(self._pages) > 1 and self._pages[1][0] <= now - self._window_s:
            self._pages.popleft()
        age = self.age(now)
        if age is not None and age > 2 * self._window_s:
            self._pages.clear()
        self._pages.append((now, page))
        began, first = self._pages[0]
        return summarize(first, page, now - began) if len(self._pages) > 1 else None

    def age(self, now: float) -> float | None:
        """Returns the seconds since the newest page was read."""
        return now - self._pages[-1][0] if self._pages else None
