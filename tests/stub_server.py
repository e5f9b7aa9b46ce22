"""A server that answers as a test wants, at an address that stays when it goes away and comes back."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Answer:
    content: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class StubServer:
    """`answer` takes the path of a GET request and its headers by their names in small letters."""

    def __init__(self, answer: Callable[[str, dict[str, str]], Answer], port: int = 0) -> None:
        self._answer = answer
        self._port = port
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
                self.send_response(given.status)
                for name, value in given.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(given.content)))
                self.end_headers()
                self.wfile.write(given.content)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
