"""Finds the processes of a server on one machine, and ends them. Also a program, the keeper: standard library only.

`raylens serve` owns the processes and holds a lock on a file in the server's folder, which each process's variable
`_MARK` names. An orderly owner stops Ray and kills the remaining processes. If it dies otherwise, the kernel releases
the lock, and the keeper, a small process that waits for it, kills them. If the keeper was killed, too, the next start
finds processes whose folder no owner has locked."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = "RAYLENS_SERVER"
_MARKED = f"{_MARK}="
_LOCK_FILE = "owner"
_KILL_SECONDS = 5.0  # a killed process remains longer only if the kernel cannot release it
_POLL_SECONDS = 0.02
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def owned_processes(folder: Path) -> Iterator[None]:
    """Owns the server in `folder`: its processes end with the block, or with this process if it is killed."""
    with (folder / _LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-I", "-S", __file__, str(folder)]
        keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            yield
        finally:
            _kill_all(folder)
            keeper.kill()
            keeper.wait()


@contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Marks the processes started during the block as those of the server in `folder`."""
    # By default, a process that changes its title, as Ray's do, overwrites its environment with it.
    variables = {_MARK: str(folder), "SPT_NOENV": "1"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def kill_orphans() -> None:
    """Kills this user's server processes whose owners have died."""
    for folder in {folder for _, folder in _marked_processes()}:
        if not _has_owner(folder):
            _kill_all(folder)


def pids_of(folder: Path) -> list[int]:
    return [pid for pid, other in _marked_processes() if other == folder]


def _has_owner(folder: Path) -> bool:
    """Returns whether the owner lives or may live: the folder may be invisible from here, in a container."""
    try:
        with (folder / _LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _kill_all(folder: Path) -> None:
    """Kills the server's processes, including any started meanwhile."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := pids_of(folder)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _marked_processes() -> Iterator[tuple[int, Path]]:
    """Yields this user's running server processes, each with its server's folder."""
    for pid, variables in own_processes("environ"):
        yield from ((pid, Path(one.removeprefix(_MARKED))) for one in variables if one.startswith(_MARKED))


def own_processes(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yields this user's processes, each with the NUL-separated parts of its `/proc/PID/FILE`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.geteuid():
                yield int(entry.name), os.fsdecode((entry / file).read_bytes()).split("\0")


def main() -> None:
    """Waits until the owner of the server in folder `argv[1]` has died, then kills the server's processes."""
    for number in _STOP_SIGNALS:  # these may be sent to all processes at once
        signal.signal(number, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    with (folder / _LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    _kill_all(folder)


if __name__ == "__main__":
    main()
