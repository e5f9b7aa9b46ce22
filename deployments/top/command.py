"""`raylens top`: its options."""

import argparse
import math
import os
from typing import Any
from urllib.parse import urlsplit

HELP = """\
Show what a server does, live: its stages, replicas, queues and caches, throughput and latencies, from its /metrics.

  raylens top                                       the server on this machine, port 8000
  raylens top --url http://10.0.0.1:8000            another one
  RAYLENS_API_KEY=rl-... raylens top                one with API keys; the key needs `admin: true`
  raylens top --once | less                         one view, also where there is no terminal

Rates and latencies are those of the last 10 seconds; counts are those since the start. Ctrl-C ends it. The page
/dashboard shows the same in a browser; docs/operating.md says what to look at.
"""
KEY_VARIABLE = "RAYLENS_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `raylens top`."""
    add: Any = parser.add_argument
    add("--url", type=_address, default=DEFAULT_URL, help="the server's address (default: %(default)s)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"an admin's key (default: the variable {KEY_VARIABLE}, which others on this machine do not see)",
    )
    add("--interval", type=_interval, default=2.0, metavar="SECONDS", help="between two readings (default: 2)")
    add("--once", action="store_true", help="show what happens in one interval, and end")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises RuntimeError where the server gives no metrics."""
    from deployments.top.watching import top

    return top(args.url, args.api_key or os.environ.get(KEY_VARIABLE) or None, args.interval, once=args.once)


def _address(text: str) -> str:
    """Takes the server's own address, and that of its API, which ends in /v1."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 on")
    return seconds
