"""A command in a terminal of its own: what is on the screen, and keys that are pressed."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOME = "\x1b[H"
_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"
_NO_CURSOR, _CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self._output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, key: str) -> None:
        os.write(self._end, key.encode())

    def frame(self) -> str:
        """The text that was drawn last as a whole, from the upper left corner on: the next one has begun."""
        frames = self._output.split(_HOME)
        return _ESCAPES.sub("", frames[-2]).replace("\r", "") if len(frames) > 2 else ""

    def is_left_as_it_was(self) -> bool:
        """Whether the screen that was there before is back, as is its cursor."""
        pairs = ((_NORMAL, _ALTERNATE), (_CURSOR, _NO_CURSOR))
        return all(self._output.rfind(last) > self._output.rfind(first) for last, first in pairs)

    def after(self) -> str:
        """What was written to the screen that was there before, once the command has ended."""
        self._reader.join(10)
        return _ESCAPES.sub("", self._output.rpartition(_NORMAL)[2]).strip()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._end, 2**16)
            except OSError:  # the command has closed its side
                return
            if not read:
                return
            self._output += read.decode(errors="replace")


def _take_terminal() -> None:
    """Keys become signals only with a controlling terminal, and Ctrl-C ends nothing that a shell has started in the
    background, as this process may have been."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(
    command: Sequence[str], *, columns: int, lines: int, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Runs the command while the block runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**own, "TERM": "xterm-256color", **(environment or {})},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
