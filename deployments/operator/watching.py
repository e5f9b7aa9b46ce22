"""Polls a server's metrics and draws them."""

import io
import sys
import time
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.recent_pages import WINDOW_SECONDS, RecentPages
from raylens.deployments.operator.running_server import NoAnswerError, RunningServer
from raylens.deployments.operator.snapshot import Snapshot
from raylens.deployments.operator.view import View

_REDRAWS_PER_SECOND = 2
_LATE_SECONDS = 1.0
"""Tolerated duration of an answer before the view reports silence."""


def top(server: RunningServer, interval_s: float, *, once: bool) -> int:
    """Draws the server's metrics every `interval_s`: once, or until the user stops it. Returns the exit status. Raises
    NoAnswerError if the first reading fails."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack bars and dots
    console = Console()
    if once or not console.is_terminal:
        console.print(View(server.url, read_twice(server, interval_s)))
        return 0
    try:
        watch(server, console, interval_s)
    except KeyboardInterrupt:
        return 0


def read(server: RunningServer) -> MetricsPage:
    """Raises NoAnswerError."""
    try:
        return MetricsPage.of_text(server.get("/metrics"))
    except ValueError as error:
        raise NoAnswerError(f"{server.url}/metrics is not a page of metrics") from error


def read_twice(server: RunningServer, interval_s: float) -> Snapshot:
    """Returns the snapshot of one interval. Raises NoAnswerError."""
    pages = RecentPages(interval_s)
    pages.add(read(server), time.monotonic())
    time.sleep(interval_s)
    snapshot = pages.add(read(server), time.monotonic())
    if snapshot is None:
        raise NoAnswerError(f"{server.url} was silent for longer than --interval")
    return snapshot


def watch(server: RunningServer, console: Console, interval_s: float) -> NoReturn:
    """Draws until the process is stopped. Waits for a server that disappeared. Raises NoAnswerError if the first
    reading fails."""
    pages = RecentPages(max(WINDOW_SECONDS, interval_s))
    pages.add(read(server), time.monotonic())
    view = View(server.url, late_s=interval_s + _LATE_SECONDS, fits_screen=True)
    # Live draws on its own thread, so the view can show how long the server has been silent.
    with Live(console=console, screen=True, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=lambda: view):
        while True:
            time.sleep(interval_s)
            try:
                snapshot = pages.add(read(server), time.monotonic())
            except NoAnswerError as error:
                view.fail(str(error))
            else:
                view.show(snapshot)
