"""A `raylens serve` of its own, all of its processes, and how the streams of its clients end."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import httpx

from raylens.deployments.free_port import free_port
from tests.background import Background
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
EVENT, DONE, CUT = "error event", "done", "cut"
_MARK = "RAYLENS_TEST_SERVER"


class Server:
    """`pid`: of `raylens serve`. Each of its processes inherits a variable of its environment."""

    def __init__(self, process: subprocess.Popen[str], port: int, mark: str) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._mark = f"{_MARK}={mark}".encode()
        self.pid = process.pid

    def wait_for_line(self, part: str) -> str:
        """Returns the next line of its output with this part."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            if part in line:
                return line
        assert self.process.stderr is not None
        raise AssertionError(f"no line with {part!r}: {self.process.stderr.read()}")

    def pids(self) -> list[int]:
        """Its processes that live."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if self._mark in (folder / "environ").read_bytes().split(b"\0") and not is_zombie:
                    found.append(int(folder.name))
        return found

    def send(self, number: signal.Signals, target: str) -> None:
        """`target`: "process", "group" (as a shell and `timeout` do) or "all" (as systemd does)."""
        if target == "all":
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif target == "group":
            os.killpg(os.getpgid(self.pid), number)
        else:
            os.kill(self.pid, number)

    def pid_of(self, program: str) -> int:
        """The process that runs Ray's program of this name."""
        (pid,) = [pid for pid in self.pids() if Path(_command(pid)[0]).name == program]
        return pid

    def seconds_to_end(self, most: float) -> float:
        """Waits until none of its processes is left, or `most` seconds are over."""
        started = time.monotonic()
        while self.pids() and time.monotonic() < started + most:
            time.sleep(0.05)
        return time.monotonic() - started

    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", self.port))
                return True
        return False

    def ends_in(self, seconds: float) -> int:
        """Returns its exit status. Nothing of it is left."""
        assert self.seconds_to_end(seconds) < seconds, "something is left"
        assert self.port_is_free()
        return self.process.wait()

    def end_left_overs(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def serving(*arguments: str, errors: IO[str] | int = subprocess.PIPE) -> Iterator[Server]:
    """Runs `raylens serve` in a session of its own. Nothing of it is left behind the block. `errors`: its stderr."""
    port, mark = free_port(), uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-m", "raylens", "serve", "--port", str(port), *arguments],
        cwd=ROOT,
        env=os.environ | {_MARK: mark},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    ) as process:
        server = Server(process, port, mark)
        try:
            yield server
        finally:
            server.end_left_overs()


class Streams(Background):
    """Clients that each read one long stream. `ends`: how those that have ended did."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(*[self._read] * number)
        self._url = url
        self._number = number
        self.ends: list[str] = []
        self._begun: list[str] = []  # whose `append` is safe among threads, unlike a sum
        self._model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def __enter__(self) -> Self:
        super().__enter__()
        wait_until(lambda: len(self._begun) == self._number, 60)
        return self

    def _read(self) -> None:
        body = {"model": self._model, "prompt": "Hello", "stream": True, "n": 8, "max_tokens": 1900, "ignore_eos": True}
        url, received, has_begun = f"{self._url}/v1/completions", b"", False
        with suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=120) as answer:
            assert answer.status_code == 200
            for chunk in answer.iter_raw():
                received = (received + chunk)[-2000:]
                if not has_begun:
                    has_begun = True
                    self._begun.append(self._model)
        self.ends.append(_end_of(received))


def _end_of(received: bytes) -> str:
    if not received.endswith(b"data: [DONE]\n\n"):
        return CUT
    return EVENT if b'data: {"error":' in received else DONE


def _command(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return [""]
