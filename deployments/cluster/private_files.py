"""Keeps a server's folder of sockets, and the token of its Ray cluster, from other users of the machine."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PLACE = "/tmp"
"""The folder is not below `TMPDIR`: names of sockets have 107 characters at most, and Ray's take up to 85 below this
folder."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder that only this user may enter, and removes it after the block. If the block fails, the folder
    stays, because it holds the logs."""
    folder = Path(tempfile.mkdtemp(prefix="raylens-", dir=_PLACE))
    has_failed = False
    try:
        yield folder
    except Exception:  # a keyboard's interrupt is no failure
        has_failed = True
        raise
    finally:
        if not has_failed:
            shutil.rmtree(folder, ignore_errors=True)


def keep_ray_token_private(home: Path, *, make: bool = True) -> None:
    """Takes away other users' right to read `~/.ray/auth_token`. Ray's clusters on this machine ask for the token in
    this file. If the file is missing, this makes it, as Ray itself would make one that everybody can read. `make`:
    False on a node of a cluster, where all nodes need the same token.

    Raises RuntimeError if that is impossible.
    """
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
    """Makes the file with all that is in it at once, because another server may start at the same time and read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with open(descriptor, "w") as new:
            new.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # the other server has made it
            os.link(name, file)
    finally:
        os.unlink(name)
