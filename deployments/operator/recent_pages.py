"""The metrics pages of the last seconds. Views show the growth from the oldest to the newest page, so figures move
steadily."""

from collections import deque

from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.snapshot import Snapshot
from raylens.deployments.operator.summarize import summarize

WINDOW_SECONDS = 10.0


class RecentPages:
    """Keeps the pages of the last `window_s` seconds."""

    def __init__(self, window_s: float = WINDOW_SECONDS) -> None:
        self._window_s = window_s
        self._pages: deque[tuple[float, MetricsPage]] = deque()

    def add(self, page: MetricsPage, now: float) -> Snapshot | None:
        """Returns the snapshot since the latest page that is at least the window older, else since the oldest page.
        None without an earlier page, or if no page was added for twice the window. `now`: monotonic seconds of the
        reading."""
        while len(self._pages) > 1 and self._pages[1][0] <= now - self._window_s:
            self._pages.popleft()
        age = self.age(now)
        if age is not None and age > 2 * self._window_s:
            self._pages.clear()
        self._pages.append((now, page))
        began, first = self._pages[0]
        return summarize(first, page, now - began) if len(self._pages) > 1 else None

    def age(self, now: float) -> float | None:
        """Returns the seconds since the newest page was read, None without a page."""
        return now - self._pages[-1][0] if self._pages else None
