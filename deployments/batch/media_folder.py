"""A folder of pictures, PDFs, videos or sounds, as the requests of a batch: one question about each file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylens.deployments.batch.request_file import LEAST_PRIORITY, BatchFileError
from raylens.deployments.batch.request_lines import BatchRequest
from raylens.preprocess.data_url import data_url

_TYPES = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp"), "image_url"),
    **dict.fromkeys(("mp4", "mov", "mkv", "webm", "avi"), "video_url"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "m4a", "aac"), "audio_url"),
    "pdf": "file",
}
"""The type of a file's content part, by the end of its name."""


class MediaFolder:
    """`custom_ids`: the files' paths within the folder, sorted."""

    def __init__(self, folder: Path, prompt: str | None, body: dict[str, Any], path: str) -> None:
        """`prompt`: what is asked about each file. `body`: the requests' other fields. `path`: of their route.

        Raises BatchFileError if the folder has no such files."""
        self._folder = folder
        self._prompt = prompt
        self._body = {"priority": LEAST_PRIORITY} | body
        self._path = path
        files = (file.relative_to(folder) for file in folder.rglob("*") if _type_of(file) and file.is_file())
        self.custom_ids = sorted(file.as_posix() for file in files if not file.name.startswith("."))
        if not self.custom_ids:
            raise BatchFileError(f"{folder} has no files that end with {', '.join(_TYPES)}")

    def requests(self, without: set[str]) -> Iterator[BatchRequest]:
        """Yields the requests in order, but for those with these ids. Raises BatchFileError for a file that cannot be
        read."""
        for custom_id in self.custom_ids:
            if custom_id not in without:
                content = [self._part(custom_id)]
                content += [] if self._prompt is None else [{"type": "text", "text": self._prompt}]
                messages = [{"role": "user", "content": content}]
                yield BatchRequest(custom_id, self._path, self._body | {"messages": messages})

    def _part(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        try:
            url = data_url(file.read_bytes(), "application/octet-stream")  # the server finds the type by the bytes
        except OSError as error:
            raise BatchFileError(f"{file}: {error.strerror}") from error
        kind = _type_of(file)
        return {"type": kind, kind: {"file_data": url} if kind == "file" else {"url": url}}


def _type_of(file: Path) -> str:
    return _TYPES.get(file.suffix.removeprefix(".").lower(), "")
