"""The command line of `raylens batch`."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import shtab

from raylens.deployments.batch.answer_file import AnswerFile
from raylens.deployments.batch.media_folder import ENDINGS, MediaFolder
from raylens.deployments.batch.request_file import BatchFileError, RequestFile
from raylens.deployments.operator.running_server import RunningServer, add_server_options

HELP = f"""\
Send the requests of a file to a running server, and write its answers to another file, in the form of OpenAI's Batch
API. Each line of INPUT is a request:

  {{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {{"messages": [...]}}}}

  raylens batch requests.jsonl answers.jsonl                          the server on this machine, port 8000
  raylens batch requests.jsonl answers.jsonl --url http://10.0.0.1:8000

INPUT may also be a folder. Each picture, PDF, video and sound in it, and in the folders below, is a request. Their
names end with {ENDINGS}.

  raylens batch ~/pictures answers.jsonl --prompt "Describe the picture." --body '{{"max_tokens": 100}}'
  raylens batch ~/pictures vectors.jsonl --endpoint /v1/embeddings

Then `custom_id` is the file's path within the folder.

OUTPUT has a line for each answered request, in any order. Stop the command at any time: the same command goes on where
it ended. The requests have the least priority, so those of people go first, and they wait while the server is away.
Exits 1 if a request has an error or no answer; `grep -v '"status_code": 200'` finds those.
"""
_ENDPOINTS = ("/v1/chat/completions", "/v1/embeddings")
"""Routes that take one conversation."""
_REPORT_SECONDS = 5.0
_REDRAW_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("requests", type=Path, metavar="INPUT", help="JSON lines of requests, or a folder").complete = shtab.FILE
    answers_help = "JSON lines of answers, new or of an earlier run"
    add("answers", type=Path, metavar="OUTPUT", help=answers_help).complete = shtab.FILE
    of_folder = parser.add_argument_group("a folder")
    of_folder.add_argument("--prompt", metavar="TEXT", help="what to ask about each file")
    others = "other fields of each request, as a JSON object"
    of_folder.add_argument("--body", type=_object, metavar="JSON", help=others)
    endpoint = "route of the requests (default: /v1/chat/completions)"
    of_folder.add_argument("--endpoint", choices=_ENDPOINTS, metavar="PATH", help=endpoint)
    add_server_options(parser)
    add("--concurrency", type=_concurrency, default=64, metavar="N", help="requests at once (default: %(default)s)")
    longest = "seconds without an answer after which a request is sent again (default: %(default)s)"
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help=longest)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not an object")
    return value


def _concurrency(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError(f"{number} is not between 1 and 4096")
    return number


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every request has an answer without an error, else 1. Raises BatchFileError, NoAnswerError."""
    from raylens.deployments.batch.sender import Sender

    requests = _requests(args)
    with AnswerFile(args.answers, requests.custom_ids) as answers:
        if answers.done:
            print(f"{len(answers.done)} of {len(requests.custom_ids)} requests were answered before", file=sys.stderr)
        sender = Sender(RunningServer.named_by(args), answers, args.timeout)
        left = requests.requests(without=set(answers.done))
        try:
            asyncio.run(_reporting(sender.send(left, args.concurrency), answers, len(requests.custom_ids)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        print(
            f"{len(answers.done)} answers are in {args.answers}, {answers.num_failed} of them errors", file=sys.stderr
        )
        return 1 if answers.num_failed or len(answers.done) < len(requests.custom_ids) else 0


def _requests(args: argparse.Namespace) -> RequestFile | MediaFolder:
    if args.requests.is_dir():
        folder = MediaFolder(args.requests, args.prompt, args.body or {}, args.endpoint or _ENDPOINTS[0])
        if folder.num_left_out:
            print(f"{folder.num_left_out} files with other endings are left out", file=sys.stderr)
        return folder
    for name in ("prompt", "body", "endpoint"):
        if getattr(args, name) is not None:
            raise BatchFileError(f"--{name} is for a folder, and {args.requests} is none")
    return RequestFile(args.requests)


async def _reporting(work: Coroutine[Any, Any, None], answers: AnswerFile, total: int) -> None:
    """Tells the progress while the work goes on: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    task = asyncio.create_task(work)
    if not console.is_terminal:
        began, first = time.monotonic(), len(answers.done)
        while not (await asyncio.wait([task], timeout=_REPORT_SECONDS))[0]:
            seconds = time.monotonic() - began
            rate = f"{(len(answers.done) - first) / seconds:.1f} a second for {seconds:.0f} s"
            told = f"{len(answers.done)} of {total} answered, {answers.num_failed} with an error, {rate}"
            print(told, file=sys.stderr, flush=True)
        return task.result()
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task("answers", total=total, completed=len(answers.done))
        while not (await asyncio.wait([task], timeout=_REDRAW_SECONDS))[0]:
            bar.update(shown, completed=len(answers.done))
        bar.update(shown, completed=len(answers.done))
    return task.result()
