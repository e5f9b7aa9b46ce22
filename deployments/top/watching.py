"""Reads a server's metrics again and again, and draws what they say."""

import io
import sys
import time
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from deployments.summary.recent_pages import WINDOW_SECONDS, RecentPages
from deployments.summary.snapshot import Snapshot
from deployments.top.metrics_reader import MetricsReader, RefusedError, UnreachableError
from deployments.top.view import View

_REDRAWS_PER_SECOND = 2
_LATE_SECONDS = 1.0
"""The longest that an answer takes without being missed."""


def top(url: str, api_key: str | None, interval_s: float, *, once: bool) -> int:
    """Draws the server at `url`, reading every `interval_s`: once, or until the process is told to stop, which is no
    failure. Returns the exit status. Raises UnreachableError or RefusedError unless the server has answered before."""
    reader = MetricsReader(url, api_key)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the terminal's encoding lacks a bar or a dot
    console = Console()
    if once or not console.is_terminal:
        console.print(View(reader.url, read_twice(reader, interval_s)))
        return 0
    try:
        watch(reader, console, interval_s)
    except KeyboardInterrupt:
        return 0


def read_twice(reader: MetricsReader, interval_s: float) -> Snapshot:
    """Returns what happens in one interval. Raises UnreachableError or RefusedError."""
    pages = RecentPages(interval_s)
    pages.add(reader.read(), time.monotonic())
    time.sleep(interval_s)
    snapshot = pages.add(reader.read(), time.monotonic())
    if snapshot is None:
        raise UnreachableError(f"{reader.url} was silent for longer than --interval")
    return snapshot


def watch(reader: MetricsReader, console: Console, interval_s: float) -> NoReturn:
    """Draws until the process is told to stop. Waits for a server that went away."""
    pages = RecentPages(max(WINDOW_SECONDS, interval_s))
    pages.add(reader.read(), time.monotonic())
    view = View(reader.url, late_s=interval_s + _LATE_SECONDS, fits_screen=True)
    # Live draws on a thread of its own, so that the view tells how long the server has been silent.
    with Live(console=console, screen=True, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=lambda: view):
        while True:
            time.sleep(interval_s)
            try:
                snapshot = pages.add(reader.read(), time.monotonic())
            except (UnreachableError, RefusedError) as error:
                view.fail(str(error))
            else:
                view.show(snapshot)
