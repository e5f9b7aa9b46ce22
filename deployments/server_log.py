"""One log file for all processes of a server on one machine; `raylens serve` shows it on its console.

Ray also keeps a log file per process; a cluster has only these. Both have lines of text or of JSON objects."""

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from raylens.deployments.ray_internals import log_fields
from raylens.deployments.request_context import note_ids
from raylens.preprocess.schema import InvalidRequestError

FILE_VARIABLE = "RAYLENS_LOG_FILE"
LEVEL_VARIABLE = "RAYLENS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
FORMAT_VARIABLE = "RAYLENS_LOG_FORMAT"
TEXT, JSON = FORMATS = ("text", "json")
FIELDS = log_fields.ATTRIBUTE
"""A log record's extra fields in our JSON and Ray's: `extra={FIELDS: {...}}`."""

_SERVE_LOGGER = "ray.serve"
_IDS = ("request_id", "trace_id", "span_id")
_MAX_BYTES = 2**26
_STDERR = 2
_PAUSE_SECONDS = 0.1


def join_server_log(process: str) -> None:
    """Makes this process write to the server's log file, if configured, as `process` plus its deployment's suffix. This
    package's loggers are children of Ray Serve's logger, so their messages also reach Ray's files."""
    serve_logger = logging.getLogger(_SERVE_LOGGER)
    serve_logger.addFilter(_is_the_servers)
    for handler in serve_logger.handlers:  # Ray's handlers use Ray's own request id
        handler.addFilter(note_ids)
    file = os.environ.get(FILE_VARIABLE)
    if file is None:
        return
    # Ray's file of the replica has each line. A third copy, on standard error, would only cost event loop time.
    for copy in [one for one in serve_logger.handlers if type(one) is logging.StreamHandler]:
        serve_logger.removeHandler(copy)
    handler = logging.FileHandler(file)  # several processes append to it
    handler.setFormatter(_formatter(process))
    handler.setLevel(os.environ.get(LEVEL_VARIABLE, "info").upper())
    handler.addFilter(lambda record: record.name != _SERVE_LOGGER or record.levelno >= logging.WARNING)
    handler.addFilter(note_ids)
    for name in ("", _SERVE_LOGGER):  # Ray Serve's logger does not propagate to the root
        logging.getLogger(name).addHandler(handler)


def stacks_descriptor() -> int:
    """Returns the descriptor for a dying process's stacks: they are text, so a text log, else Ray's file of stderr."""
    file = os.environ.get(FILE_VARIABLE)
    if file is None or _is_json():
        return _STDERR
    return os.open(file, os.O_WRONLY | os.O_APPEND)


@cache
def process_name() -> str:
    """Returns the name of this replica, DEPLOYMENT#TAG; empty outside Ray Serve."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        context = serve.get_replica_context()
    except RayServeException:
        return ""
    return f"{context.deployment}#{context.replica_tag}"


def ray_logging() -> dict[str, str]:
    """Returns the matching settings of Ray's own log files."""
    level = "DEBUG" if os.environ.get(LEVEL_VARIABLE) == "debug" else "INFO"
    return {"encoding": "JSON" if _is_json() else "TEXT", "log_level": level}


def _is_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == JSON


def _formatter(process: str) -> logging.Formatter:
    if _is_json():
        return JsonLines(process_name() or process)
    suffix = "".join(process_name().partition("#")[0].partition("-")[1:])
    name = f"{process}{suffix}".replace("%", "%%")
    return logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s", "%H:%M:%S")


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line. `process`: the name of the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        own = record.__dict__
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: own[name] for name in _IDS if name in own},
            **own.get(FIELDS, {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


_NO_FAILURES = (  # beginnings of Ray Serve's warnings that report no failure
    "Failed to start RequestProtocol.",  # another server has the port behind HAProxy; Ray Serve tries the next one
    "Failed to get queue length from ",  # a busy replica has not answered for 0.1 s; a hung one shows in the health
)


def _is_the_servers(record: logging.LogRecord) -> bool:
    """Drops _NO_FAILURES and tracebacks for a client's mistake or disconnect, which the request log has."""
    error = record.exc_info[1] if record.exc_info else None
    is_clients = isinstance(error, InvalidRequestError | asyncio.CancelledError)
    return not is_clients and not record.getMessage().startswith(_NO_FAILURES)


@contextmanager
def shown(file: Path, console: TextIO | None = None) -> Iterator[None]:
    """Copies new text of the file to `console` while the block runs; by default to standard error."""
    file.touch(mode=0o600)
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(file, console or sys.stderr, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(file: Path, console: TextIO, ended: threading.Event) -> None:
    with file.open() as lines:
        is_last = False
        while not is_last:
            is_last = ended.wait(_PAUSE_SECONDS)
            if text := lines.read():
                print(text, end="", file=console, flush=True)
            if lines.tell() > _MAX_BYTES:  # the text is on the console, and writers append to the file
                os.truncate(file, 0)
                lines.seek(0)
