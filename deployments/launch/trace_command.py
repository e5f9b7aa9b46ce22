"""`raylens trace`: shows the stage times of a request, from the server's log or from an answer."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

HELP = """\
Show a request's stage times: a line for each stage, with a bar on the request's time axis.

  raylens serve --log-format json 2>&1 | raylens trace      each request as it ends
  raylens trace server.log --id 3f1c9a                      the header X-Request-Id of the answer, or the answer's id
  raylens trace < answer.json                               an answer to a request with "stage_timings": true
  raylens trace answer.json --svg waterfall.svg             also as an SVG drawing

The input is a log of JSON lines, an answer, or a stream of events. Requests without stage times are skipped. The faint
bar is decoding as a whole. See docs/tracing.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="the log or the answer (default: standard input)")
    add("--id", help="draw only the request with this id")
    add("--svg", type=Path, metavar="FILE", help="write a drawing of the last request to FILE, too")


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Raises RuntimeError if there is nothing to draw, or if a file cannot be read or written."""
    from raylens.deployments.operator.waterfall import as_svg, as_text, timed_request

    found = False
    try:
        with nullcontext(sys.stdin) if args.file is None else args.file.open(errors="replace") as text:
            for document in _documents(text):
                request = timed_request(document)
                if request is None or args.id not in (None, request.request_id, request.response_id):
                    continue
                say(("\n" if found else "") + as_text(request, shutil.get_terminal_size().columns))
                found = True
                if args.svg is not None:
                    args.svg.write_text(as_svg(request))
    except OSError as error:
        raise RuntimeError(f"{error.filename}: {error.strerror}") from error
    if not found:
        which = "no request" if args.id is None else f"no request {args.id}"
        raise RuntimeError(f"{which} with stage times in {args.file or 'standard input'}")
    return 0


def _documents(text: TextIO) -> Iterator[str]:
    """Yields each line, or a multi-line answer as a whole."""
    for line in text:
        yield line + text.read() if line.strip() == "{" else line
