"""Protects a server's folder of sockets and the token of its Ray cluster from other users of the machine."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PLACE = "/tmp"
"""Not `TMPDIR`: paths of sockets are limited to 107 characters, and Ray's take up to 85 below the folder."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Creates a folder that only this user may enter, and removes it with the block unless the block fails."""
    folder = Path(tempfile.mkdtemp(prefix="raylens-", dir=_PLACE))
    has_failed = False
    try:
        yield folder
    except Exception:  # KeyboardInterrupt is no failure
        has_failed = True
        raise
    finally:
        if not has_failed:
            shutil.rmtree(folder, ignore_errors=True)


def keep_ray_token_private(home: Path, *, make: bool = True) -> None:
    """Makes `~/.ray/auth_token`, the token of Ray's clusters on this machine, unreadable for other users. Creates a
    missing file, because Ray would create a world-readable one. `make`: False on a node of a cluster, where all nodes
    need the same token. Raises RuntimeError if that is impossible."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return
    file = home / ".ray" / "auth_token"
    try:
        if file.exists():
            file.chmod(0o600)
        elif make:
            _make_token(file)
    except OSError as error:
        raise RuntimeError(f"{file}, the token of Ray's clusters, cannot be kept private: {error.strerror}") from error


def _make_token(file: Path) -> None:
    """Creates the file with its content atomically, because another server may start and read it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with open(descriptor, "w") as new:
            new.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another server created it
            os.link(name, file)
    finally:
        os.unlink(name)
