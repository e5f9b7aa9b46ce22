"""The file of a batch's requests: JSON lines in the form of OpenAI's Batch API.

The form: https://platform.openai.com/docs/guides/batch. The file may be larger than memory: its lines are read twice,
first to check all of them, then each when it is sent."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_MAX_ID_CHARS = 512
_LEAST_PRIORITY = 1000
"""Requests of people go first."""


class BatchFileError(ValueError):
    """A file of a batch cannot be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    path: str
    body: dict[str, Any]


class RequestFile:
    """`custom_ids`: of all requests, in order."""

    def __init__(self, file: Path) -> None:
        """Raises BatchFileError if a line is no request of a batch, or has the id of another one."""
        self._file = file
        self._offsets: dict[str, int] = {}
        numbers: dict[str, int] = {}
        try:
            with file.open("rb") as lines:
                offset = 0
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        custom_id = self._request(line, number).custom_id
                        if custom_id in numbers:
                            raise self._error(number, f"custom_id {custom_id!r} is that of line {numbers[custom_id]}")
                        numbers[custom_id], self._offsets[custom_id] = number, offset
                    offset += len(line)
        except OSError as error:
            raise BatchFileError(f"{file}: {error.strerror}") from error
        if not self._offsets:
            raise BatchFileError(f"{file} has no requests")

    @property
    def custom_ids(self) -> list[str]:
        return list(self._offsets)

    def requests(self, without: set[str]) -> Iterator[BatchRequest]:
        """Yields the requests in order, but for those with these ids."""
        with self._file.open("rb") as lines:
            for custom_id, offset in self._offsets.items():
                if custom_id not in without:
                    lines.seek(offset)
                    yield self._request(lines.readline(), 0)

    def _request(self, line: bytes, number: int) -> BatchRequest:
        try:
            given = from_json(line)
        except ValueError as error:
            raise self._error(number, f"not valid JSON: {error}") from error
        if not isinstance(given, dict):
            raise self._error(number, "not an object")
        custom_id, path, body = given.get("custom_id"), given.get("url"), given.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
            raise self._error(number, f"custom_id has to be a text of at most {_MAX_ID_CHARS} characters")
        if given.get("method", "POST") != "POST":
            raise self._error(number, "method has to be POST")
        if path not in PATHS:
            raise self._error(number, f"url has to be one of {', '.join(PATHS)}, not {json.dumps(path)[:100]}")
        if not isinstance(body, dict):
            raise self._error(number, "body has to be an object")
        if body.get("stream") or body.get("background"):
            raise self._error(number, "body: the answers of a batch come as a whole, without stream and background")
        return BatchRequest(custom_id, path, {"priority": _LEAST_PRIORITY} | body)

    def _error(self, number: int, reason: str) -> BatchFileError:
        return BatchFileError(f"{self._file}, line {number}: {reason}")
