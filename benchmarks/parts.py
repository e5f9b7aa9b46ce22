"""Runs the parts of a long benchmark as separate processes with time limits. A part that crashes or hangs affects no
other, and its partial document counts."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TREE = Path(__file__).resolve().parent.parent
END_SECONDS = 15.0
"""Grace period for a part after its time limit, to stop its own processes."""
_NUM_LINES = 15
_LOOK_SECONDS = 0.5

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """`arguments`: Python's; `--output` and a file for the document are appended. `seconds`: the time limit. `needs`:
    modules; without them the part is skipped."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part. `document` may be partial. `last_lines`: the end of a failed part's output."""

    state: Literal["running", "ok", "failed", "timed out", "skipped"]
    seconds: float = 0.0
    reason: str = ""
    document: Document = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)

    def shown(self) -> Document:
        return {name: value for name, value in asdict(self).items() if value not in ("", [], {})}


def run_part(
    part: Part, seconds: float | None = None, on_document: Callable[[Document], None] = lambda document: None
) -> Outcome:
    """Runs the part up to its limit, and no longer than `seconds`. `on_document` gets each new state of its
    document."""
    for module in part.needs:
        if importlib.util.find_spec(module) is None:
            return Outcome("skipped", reason=f"{module} cannot be imported")
    limit = part.seconds if seconds is None else min(part.seconds, seconds)
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "document.json"), Path(folder, "log")
        written = ""

        def look() -> None:
            nonlocal written
            if output.exists() and (text := output.read_text()) != written:
                written = text
                on_document(json.loads(text))

        started = time.monotonic()
        status = _run([sys.executable, *part.arguments, "--output", str(output)], log, limit, look)
        taken = round(time.monotonic() - started, 1)
        look()
        document = json.loads(written) if written else {}
        if status == 0:
            return Outcome("ok", taken, document=document)
        lines = log.read_text(errors="replace").splitlines()[-_NUM_LINES:]
    if status is None:
        return Outcome("timed out", taken, f"took more than {limit:.0f} s", document, lines)
    reason = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    return Outcome("failed", taken, reason, document, lines)


def _run(command: list[str], log: Path, seconds: float, look: Callable[[], None]) -> int | None:
    """Returns the command's status, None after a timeout. Calls `look` all the while."""
    deadline = time.monotonic() + seconds
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, cwd=TREE, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while (left := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, _LOOK_SECONDS))
            look()
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process, so that it stops its own processes, and then kills its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
