"""Finds the processes of a server on one machine, and ends them. Also a program: the keeper.

`raylens serve` owns them. Each inherits the variable `_MARK`, which names the server's folder, whichever process
started it. While the owner lives, it holds a lock on a file in that folder.

An owner that ends in order ends Ray first, and kills what is left. If the owner dies in any other way, the kernel
releases the lock. The keeper, a small process beside the owner, waits for that and kills the processes. If the keeper
was killed, too, the next start finds processes of a folder that no owner has locked.

The keeper uses nothing but the standard library."""

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
_LOCK_FILE = "owner"
_KILL_SECONDS = 5.0
"""A killed process stays longer only where the kernel does not let go of it."""
_POLL_SECONDS = 0.02
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def owned_processes(folder: Path) -> Iterator[None]:
    """Makes this process the owner of the server in `folder` while the block runs. After the block none of the server's
    processes is left, nor if this process is killed."""
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
    """Marks the processes that this one starts during the block as those of the server in `folder`."""
    # By default a process that changes its title, as Ray's do, overwrites its environment with it.
    variables = {_MARK: str(folder), "SPT_NOENV": "1"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def kill_orphans() -> None:
    """Kills this user's processes of servers whose owners have died."""
    for folder in {folder for _, folder in _marked_processes()}:
        if not _has_owner(folder):
            _kill_all(folder)


def pids_of(folder: Path) -> list[int]:
    """Returns the processes of the server in `folder`."""
    return [pid for pid, other in _marked_processes() if other == folder]


def _has_owner(folder: Path) -> bool:
    """Returns whether the owner lives, or may live: out of a container its server's folder is not to be seen."""
    try:
        with (folder / _LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _kill_all(folder: Path) -> None:
    """Kills the server's processes, and those that these start meanwhile."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := pids_of(folder)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _marked_processes() -> Iterator[tuple[int, Path]]:
    """Yields this user's processes of servers, each with its server's folder. Ended ones are left out."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.geteuid():
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    name, _, folder = variable.partition(b"=")
                    if name == _MARK.encode():
                        yield int(entry.name), Path(os.fsdecode(folder))


def main() -> None:
    """Waits until the owner of the server in the folder that is named has died, and kills the server's processes."""
    for number in _STOP_SIGNALS:  # they may come to all processes at once
        signal.signal(number, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    with (folder / _LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    _kill_all(folder)


if __name__ == "__main__":
    main()
