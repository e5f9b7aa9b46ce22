"""Reads media from local files by `file:` URL: only regular files below one folder, for any spelling of the URL."""

import asyncio
import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from raylens.preprocess.media import MediaLimits, check_size
from raylens.preprocess.schema import invalid_media

_READ_BYTES = 2**20
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LocalMedia:
    """Reads files below `root`, or none without a root. Symbolic links may lead to other places below the root."""

    def __init__(self, root: Path | None, limits: MediaLimits) -> None:
        """Raises NotADirectoryError or FileNotFoundError if `root` is no folder."""
        self._limits = limits
        self._root = None if root is None else os.path.realpath(os.fsencode(root), strict=True)
        if self._root is not None:
            os.close(os.open(self._root, _OPEN_FOLDER))

    async def read(self, url: str) -> bytes:
        """Returns the content of the file that `url` names: file:///absolute/path, or file:path below the root.

        Raises InvalidRequestError if there is no root, the URL is malformed, or the file is missing, not below the
        root, no regular file, empty or over the limit of bytes."""
        if self._root is None:
            raise invalid_media("media from local files is switched off on this server", "media_local_disabled")
        path = _path_of(url)
        return await asyncio.to_thread(self._read, self._root, path)

    def _read(self, root: bytes, path: bytes) -> bytes:
        resolved = os.path.realpath(os.path.join(root, path))
        if not resolved.startswith(root.rstrip(b"/") + b"/"):
            raise invalid_media("the file is not below this server's folder of media", "media_url_forbidden")
        content = bytearray()
        try:
            with _opened(root, os.path.relpath(resolved, root).split(b"/")) as file:
                _check_regular(os.fstat(file.fileno()))
                # The limit applies to the bytes read, because the stated size of a file may be missing or grow.
                while len(content) <= self._limits.max_item_bytes and (chunk := file.read(_READ_BYTES)):
                    content += chunk
        except FileNotFoundError as error:
            raise invalid_media(
                "there is no such file below this server's folder of media", "media_fetch_failed"
            ) from error
        except OSError as error:
            raise invalid_media("the file cannot be read", "media_fetch_failed") from error
        check_size(content, limits=self._limits)
        return bytes(content)


def _opened(root: bytes, names: list[bytes]) -> BinaryIO:
    """Opens the file at the path `names` below `root`, one folder after another. No name may be a symbolic link: all
    links have been resolved, and a link created since then would bypass the check."""
    folder = os.open(root, _OPEN_FOLDER)
    try:
        for name in names[:-1]:
            inner = os.open(name, _OPEN_FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Checked before opening, because opening some devices has side effects. The caller checks the open file again.
        _check_regular(os.stat(names[-1], dir_fd=folder, follow_symlinks=False))
        descriptor = os.open(names[-1], _OPEN_FILE, dir_fd=folder)
    finally:
        os.close(folder)
    return os.fdopen(descriptor, "rb", buffering=0)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise invalid_media("the file: URL does not name a regular file", "media_url_forbidden")


def _path_of(url: str) -> bytes:
    """Returns the path in a file: URL, percent-decoded once. Raises InvalidRequestError for other URLs."""
    scheme, colon, rest = url.partition(":")
    if scheme.lower() != "file" or not colon:
        raise invalid_media("the URL of a local file starts with file:", "invalid_media_url")
    if "?" in rest or "#" in rest:
        raise invalid_media("a file: URL has neither ? nor # (in a name they are %3F and %23)", "invalid_media_url")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise invalid_media("a file: URL names no other host, it is file:///path or file:path", "invalid_media_url")
        rest = slash + path
    try:
        decoded = unquote_to_bytes(rest)
    except UnicodeEncodeError as error:
        raise invalid_media("the file: URL is no Unicode text", "invalid_media_url") from error
    if not decoded or b"\0" in decoded:
        raise invalid_media("the path of the file: URL is empty or holds a zero byte", "invalid_media_url")
    return decoded
