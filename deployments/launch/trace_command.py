"""`raylens trace`: where the time of one request went, asked of a server that runs."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from raylens.deployments.api.traces import Trace
from raylens.deployments.operator.running_server import NoAnswerError, RunningServer, add_server_options
from raylens.deployments.operator.waterfall import as_svg, as_text

HELP = """\
Show where the time of one request went: a line for each stage that worked on it, with its share of the time drawn.

  raylens trace 3f1c9a                              the id in the answer's header X-Request-Id
  raylens trace chatcmpl-3f1c9a                     the answer's own id does as well
  raylens trace 3f1c9a --svg waterfall.svg          the same as a drawing
  raylens trace 3f1c9a --url https://vision.example.com --api-key rl-...

A server keeps the times of its last 1024 requests for generated text (`shared.max_traces`). With API keys, it tells a
key of its own requests only, and an admin's key of all. Faint lines are wholes that other lines are parts of. See
docs/tracing.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("request_id", metavar="ID", help="id of the request or of its answer")
    add_server_options(parser, whose_key="the request's or an admin's")
    add("--svg", type=Path, metavar="FILE", help="write a drawing to FILE, too")
    add("--json", action="store_true", help="print what the server tells, instead of lines")


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Raises NoAnswerError where the server does not tell, and RuntimeError where the drawing cannot be written."""
    server = RunningServer.named_by(args)
    told = server.get(f"/v1/traces/{quote(args.request_id, safe='')}")
    try:
        trace = Trace.model_validate_json(told)
    except ValidationError as error:
        raise NoAnswerError(f"{server.url} does not answer as this version of Raylens does") from error
    if args.svg is not None:
        try:
            args.svg.write_text(as_svg(trace))
        except OSError as error:
            raise RuntimeError(f"{args.svg}: {error.strerror}") from error
    say(told if args.json else as_text(trace, shutil.get_terminal_size().columns))
    return 0
