"""`raylens trace`: where the time of one request went, asked of a server that runs."""

import argparse
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from deployments.api.traces import Trace
from deployments.top.command import DEFAULT_URL, KEY_VARIABLE
from deployments.waterfall import as_svg, as_text

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
_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("request_id", metavar="ID", help="id of the request or of its answer")
    add("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    add("--api-key", metavar="KEY", help=f"the request's key, or an admin's (default: ${KEY_VARIABLE})")
    add("--svg", type=Path, metavar="FILE", help="write a drawing to FILE, too")
    add("--json", action="store_true", help="print what the server tells, instead of lines")


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Raises RuntimeError where the server does not tell, or the drawing cannot be written."""
    told = _ask(args.url.rstrip("/"), args.request_id, args.api_key or os.environ.get(KEY_VARIABLE))
    try:
        trace = Trace.model_validate_json(told)
    except ValidationError as error:
        raise RuntimeError(f"{args.url} does not answer as this version of Raylens does") from error
    if args.svg is not None:
        try:
            args.svg.write_text(as_svg(trace))
        except OSError as error:
            raise RuntimeError(f"{args.svg}: {error.strerror}") from error
    say(told if args.json else as_text(trace, shutil.get_terminal_size().columns))
    return 0


def _ask(url: str, request_id: str, key: str | None) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url}/v1/traces/{quote(request_id, safe='')}", headers=headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            told: str = answer.read().decode()
            return told
    except urllib.error.HTTPError as error:
        raise RuntimeError(_reason(url, error, has_key=key is not None)) from error
    except (ValueError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise RuntimeError(f"no Raylens answers at {url}: {reason}. --url names another server") from error


def _reason(url: str, error: urllib.error.HTTPError, *, has_key: bool) -> str:
    if error.code == 401 and not has_key:
        return f"{url} asks for an API key: --api-key, or {KEY_VARIABLE} in the environment"
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {error.code}"
    return f"{url}: {message}"
