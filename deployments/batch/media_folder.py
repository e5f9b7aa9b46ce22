"""A folder of pictures, PDFs, videos or sounds, as the requests of a batch: one question about each file."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylens.deployments.batch.request_file import LEAST_PRIORITY, BatchFileError
from raylens.deployments.batch.request_lines import BatchRequest, LineError, request_in
from raylens.preprocess.data_url import data_url

_TYPES = {
    **dict.fromkeys(("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp"), "image_url"),
    **dict.fromkeys(("mp4", "m4v", "mov", "mkv", "webm", "avi", "ts"), "video_url"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "oga", "opus", "m4a", "aac"), "audio_url"),
    "pdf": "file",
}
"""The type of a file's content part, by the end of its name."""
ENDINGS = ", ".join(_TYPES)


class MediaFolder:
    """`custom_ids`: the files' paths within the folder, sorted. `num_left_out`: files with other endings."""

    def __init__(self, folder: Path, prompt: str | None, body: dict[str, Any], path: str) -> None:
        """`prompt`: what is asked about each file. `body`: the requests' other fields; `messages` among them come
        before the file. `path`: of the requests' route.

        Raises BatchFileError if the folder has no such files, or one that cannot be read or has a name that is not
        UTF-8, and for fields that no batch has."""
        self._folder = folder
        self._prompt = prompt
        self._path = path
        self._body = {"priority": LEAST_PRIORITY} | body
        self._opening = self._body.pop("messages", [])
        if not isinstance(self._opening, list):
            raise BatchFileError("--body: messages has to be a list")
        files = [file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder))]
        self.custom_ids = sorted(file.relative_to(folder).as_posix() for file in files if _type_of(file))
        self.num_left_out = len(files) - len(self.custom_ids)
        if not self.custom_ids:
            raise BatchFileError(f"{folder} has no files that end with {ENDINGS}")
        for name in self.custom_ids:
            self._check(name)

    def _check(self, name: str) -> None:
        try:
            line = {"custom_id": name, "url": self._path, "body": self._body}
            request_in(json.dumps(line, ensure_ascii=False).encode())
        except UnicodeEncodeError as error:
            raise BatchFileError(f"{self._folder}: the name {name!r} is not UTF-8") from error
        except LineError as error:
            raise BatchFileError(f"{self._folder / name}: {error}") from error
        if not os.access(self._folder / name, os.R_OK):
            raise BatchFileError(f"{self._folder / name}: cannot be read")

    def requests(self, without: set[str]) -> Iterator[BatchRequest]:
        """Yields the requests in order, but for those with these ids. A file that is gone by now is named on standard
        error."""
        for custom_id in self.custom_ids:
            if custom_id in without:
                continue
            try:
                content = [self._part(self._folder / custom_id)]
            except OSError as error:
                print(f"{self._folder / custom_id}: {error.strerror}", file=sys.stderr)
                continue
            content += [] if self._prompt is None else [{"type": "text", "text": self._prompt}]
            messages = [*self._opening, {"role": "user", "content": content}]
            yield BatchRequest(custom_id, self._path, self._body | {"messages": messages})

    def _part(self, file: Path) -> dict[str, Any]:
        url = data_url(file.read_bytes(), "application/octet-stream")  # the server finds the type by the bytes
        kind = _type_of(file)
        return {"type": kind, kind: {"file_data": url} if kind == "file" else {"url": url}}


def _type_of(file: Path) -> str:
    return _TYPES.get(file.suffix.removeprefix(".").lower(), "")


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)
