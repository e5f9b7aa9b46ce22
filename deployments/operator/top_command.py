"""`raylens top`: polls a server's metrics and draws them."""

import argparse
import io
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.running_server import NoAnswerError, RunningServer, add_server_options
from raylens.deployments.operator.snapshot import Snapshot
from raylens.deployments.operator.summarize import WINDOW_SECONDS, RecentPages

if TYPE_CHECKING:
    from rich.console import Console

HELP = """\
Show a server's stages, replicas, queues, caches, throughput and latencies, live, from its /metrics.

  raylens top                                       the server on this machine, port 8000
  raylens top --url http://10.0.0.1:8000            another server
  RAYLENS_API_KEY=rl-... raylens top                a server with API keys; the key needs `admin: true`
  raylens top --once | less                         one view, also without a terminal

Rates and latencies cover the last 10 seconds, counts the time since the start. Ctrl-C ends it. The page /dashboard
shows the same in a browser; docs/operating.md explains the figures.
"""
_REDRAWS_PER_SECOND = 2
_LATE_SECONDS = 1.0  # tolerated duration of an answer before the view reports silence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add: Any = parser.add_argument
    add("--interval", type=_interval, default=2.0, metavar="SECONDS", help="between two readings (default: 2)")
    add("--once", action="store_true", help="show one interval, and end")


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 on")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Draws the server's metrics, once or until the user stops it. Raises NoAnswerError if the first reading fails."""
    from rich.console import Console

    from raylens.deployments.operator.view import View

    server = RunningServer.named_by(args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack bars and dots
    console = Console()
    if args.once or not console.is_terminal:
        console.print(View(server.url, _read_twice(server, args.interval)))
        return 0
    try:
        _watch(server, console, args.interval)
    except KeyboardInterrupt:
        return 0


def _read(server: RunningServer) -> MetricsPage:
    try:
        return MetricsPage.of_text(server.get("/metrics"))
    except ValueError as error:
        raise NoAnswerError(f"{server.url}/metrics is not a page of metrics") from error


def _read_twice(server: RunningServer, interval_s: float) -> Snapshot:
    pages = RecentPages(interval_s)
    pages.add(_read(server), time.monotonic())
    time.sleep(interval_s)
    snapshot = pages.add(_read(server), time.monotonic())
    if snapshot is None:
        raise NoAnswerError(f"{server.url} was silent for longer than --interval")
    return snapshot


def _watch(server: RunningServer, console: "Console", interval_s: float) -> NoReturn:
    """Waits for a server that disappeared. Raises NoAnswerError if the first reading fails."""
    from rich.live import Live

    from raylens.deployments.operator.view import View

    pages = RecentPages(max(WINDOW_SECONDS, interval_s))
    pages.add(_read(server), time.monotonic())
    view = View(server.url, late_s=interval_s + _LATE_SECONDS, fits_screen=True)
    # Live draws on its own thread, so the view can show how long the server has been silent.
    with Live(console=console, screen=True, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=lambda: view):
        while True:
            time.sleep(interval_s)
            try:
                snapshot = pages.add(_read(server), time.monotonic())
            except NoAnswerError as error:
                view.fail(str(error))
            else:
                view.show(snapshot)
