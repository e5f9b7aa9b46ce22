"""Reads a server's metrics again and again, and draws what they say."""

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
"""The longest that an answer takes without being missed."""


def top(server: RunningServer, interval_s: float, *, once: bool) -> int:
    """Draws the server, reading every `interval_s`: once, or until the process is told to stop, which is no failure.
    Returns the exit status. Raises NoAnswerError unless the server has answered before."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the terminal's encoding lacks a bar or a dot
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
    """Returns what happens in one interval. Raises NoAnswerError."""
    pages = RecentPages(interval_s)
    pages.add(read(server), time.monotonic())
    time.sleep(interval_s)
    snapshot = pages.add(read(server), time.monotonic())
    if snapshot is None:
        raise NoAnswerError(f"{server.url} was silent for longer than --interval")
    return snapshot


def watch(server: RunningServer, console: Console, interval_s: float) -> NoReturn:
    """Draws until the process is told to stop. Waits for a server that went away."""
    pages = RecentPages(max(WINDOW_SECONDS, interval_s))
    pages.add(read(server), time.monotonic())
    view = View(server.url, late_s=interval_s + _LATE_SECONDS, fits_screen=True)
    # Live draws on a thread of its own, so that the view tells how long the server has been silent.
    with Live(console=console, screen=True, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=lambda: view):
        while True:
            time.sleep(interval_s)
            try:
                snapshot = pages.add(read(server), time.monotonic())
            except NoAnswerError as error:
                view.fail(str(error))
            else:
                view.show(snapshot)
