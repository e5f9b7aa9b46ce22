"""`raylens top`: its options."""

import argparse
import math
from typing import Any

from raylens.deployments.operator.running_server import RunningServer, add_server_options

HELP = """\
Show what a server does, live: its stages, replicas, queues and caches, throughput and latencies, from its /metrics.

  raylens top                                       the server on this machine, port 8000
  raylens top --url http://10.0.0.1:8000            another one
  RAYLENS_API_KEY=rl-... raylens top                one with API keys; the key needs `admin: true`
  raylens top --once | less                         one view, also where there is no terminal

Rates and latencies are those of the last 10 seconds; counts are those since the start. Ctrl-C ends it. The page
/dashboard shows the same in a browser; docs/operating.md says what to look at.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser, whose_key="an admin's")
    add: Any = parser.add_argument
    add("--interval", type=_interval, default=2.0, metavar="SECONDS", help="between two readings (default: 2)")
    add("--once", action="store_true", help="show what happens in one interval, and end")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises NoAnswerError if the server gives no metrics."""
    from raylens.deployments.operator.watching import top

    return top(RunningServer.named_by(args), args.interval, once=args.once)


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 on")
    return seconds
