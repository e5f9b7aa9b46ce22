"""One log file for all processes of a server on one machine; `raylens serve` shows it on its console.

Ray also keeps a log file for each process. On a cluster there are only Ray's files."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from preprocess.schema import InvalidRequestError

FILE_VARIABLE = "RAYLENS_LOG_FILE"
LEVEL_VARIABLE = "RAYLENS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")

_SERVE_LOGGER = "ray.serve"
_MAX_BYTES = 2**26
_PAUSE_SECONDS = 0.1


def join_server_log(process: str) -> None:
    """Makes this process write into the server's log file, if there is one, under the name `process` and what its
    deployment's name ends with: a shard's number, or the name of a further model.

    The loggers of this package are children of Ray Serve's logger, so their messages also reach Ray's files.
    """
    logging.getLogger(_SERVE_LOGGER).addFilter(_is_the_servers)
    file = os.environ.get(FILE_VARIABLE)
    if file is None:
        return
    handler = logging.FileHandler(file)  # several processes append to it
    name = f"{process}{_suffix()}".replace("%", "%%")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s", "%H:%M:%S"))
    handler.setLevel(os.environ.get(LEVEL_VARIABLE, "info").upper())
    handler.addFilter(lambda record: record.name != _SERVE_LOGGER or record.levelno >= logging.WARNING)
    for name in ("", _SERVE_LOGGER):  # Ray Serve's hands nothing on to the root
        logging.getLogger(name).addHandler(handler)


def _suffix() -> str:
    from ray.serve.context import _get_internal_replica_context

    context = _get_internal_replica_context()
    return "" if context is None else "".join(context.deployment.partition("-")[1:])


def _is_the_servers(record: logging.LogRecord) -> bool:
    """Returns whether the record is about a failure of the server. Ray Serve also prints a traceback for a client's
    mistake, and where the client has left; the log of requests has a line about those."""
    error = record.exc_info[1] if record.exc_info else None
    is_clients = isinstance(error, InvalidRequestError | asyncio.CancelledError)
    # Another server of this machine has the port behind HAProxy: Ray Serve takes the next one.
    return not is_clients and not record.getMessage().startswith("Failed to start RequestProtocol.")


@contextmanager
def shown(file: Path, console: TextIO | None = None) -> Iterator[None]:
    """Shows on `console` what is written into the file while the block runs; by default on standard error."""
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
                console.write(text)
                console.flush()
            if lines.tell() > _MAX_BYTES:  # its text is on the console, and writers append to the file
                os.truncate(file, 0)
                lines.seek(0)
