"""What the endpoint's port answers while `raylens serve` starts: a page for browsers that looks again every second, the
states of the stages at `/health`, and an error with Retry-After for all else.

HAProxy listens on the port beside it (SO_REUSEPORT). It answers 503 until every stage is ready, and then alone."""

import html
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TextIO, cast

from raylens.deployments.cluster.waiting_page import waiting_page
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import HAS_HAPROXY

_RETRY_SECONDS = 1
_CLIENT_SECONDS = 5.0
_MOST_BYTES = 2**20
"""Of a request's body."""
_PROGRESS = re.compile(r"[^\n]*: [^\n]* of [^\n]* left")
"""A line of `modeling/load_progress.py`."""
_STATE = re.compile(r"([\w.-]+) (ready|loading|unhealthy)\b")
_CONTENT = """<p>{step}, {seconds:.0f} s so far. This page looks again by itself.</p>
<table>{rows}</table>
<small>{progress}</small>"""


class StartPage:
    """The progress of a start. `stages`: names of all stages."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._began = time.monotonic()
        self._states = dict.fromkeys(stages, "starting")
        self._step = "starting"
        self._progress = ""

    def say(self, line: str) -> None:
        """Takes a line of `running_app`."""
        states = dict(_STATE.findall(line))
        self._step = "loading the stages" if states else line.strip()
        for name in self._states.keys() & states.keys():
            self._states[name] = "ready" if states[name] == "ready" else "starting"

    def reading(self, console: TextIO) -> TextIO:
        """Returns a stream for the stages' log that goes to the console, too."""
        return cast(TextIO, _Tee(self, console))

    def read(self, text: str) -> None:
        for found in _PROGRESS.findall(text):
            self._progress = found.strip()

    def health(self) -> dict[str, Any]:
        return {"ready": False, "stages": self._states, "details": {}}

    def page(self) -> str:
        rows = "".join(
            f'<tr><td>{html.escape(name)}</td><td class="{state}">{state}</td></tr>'
            for name, state in self._states.items()
        )
        content = _CONTENT.format(
            step=html.escape(self._step.capitalize()),
            seconds=time.monotonic() - self._began,
            rows=rows,
            progress=html.escape(self._progress),
        )
        return waiting_page("Raylens starts", content)


class _Tee(io.TextIOBase):
    def __init__(self, start: StartPage, console: TextIO) -> None:
        self._start, self._console = start, console

    def write(self, text: str) -> int:
        self._start.read(text)
        return self._console.write(text)

    def flush(self) -> None:
        self._console.flush()


class _Server(ThreadingTCPServer):
    """`start`: what it tells of. An HTTPServer would also look up the host's name, and a name server may be silent."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, address: tuple[str, int], start: StartPage) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.start = start
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        length = self.headers.get("content-length", "")
        self.rfile.read(min(int(length) if length.isdecimal() else 0, _MOST_BYTES))  # else the client gets no answer
        start = cast(_Server, self.server).start
        if self.path in ("/health", "/ping"):
            self._answer("application/json", json.dumps(start.health()))
        elif "text/html" in self.headers.get("accept", ""):
            self._answer("text/html; charset=utf-8", start.page())
        else:
            message, code = "the server starts, see /health", "starting"
            error = {"message": message, "type": "server_error", "param": None, "code": code}
            self._answer("application/json", json.dumps({"error": error}))

    do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815

    def _answer(self, media_type: str, text: str) -> None:
        content = text.encode()
        self.send_response_only(503)
        for name, value in (
            ("Content-Type", media_type),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
            ("Retry-After", str(_RETRY_SECONDS)),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def start_page(config: AppConfig, host: str, port: int) -> Iterator[StartPage]:
    """Serves the page while the block runs."""
    start = StartPage([*_stage_names(config)])
    if not HAS_HAPROXY:
        yield start
        return
    server = _Server((host, port), start)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield start
    finally:
        server.shutdown()
        server.server_close()


def _stage_names(config: AppConfig) -> Iterator[str]:
    yield "shared"
    for suffix, own in config.by_suffix().items():
        yield from (
            f"{stage}{suffix}"
            for stage in ("preprocess", "encode", "generate")
            if own.encode.placement != "inline" or stage != "encode"
        )
