"""Lines of requests, in the form of OpenAI's Batch API: https://platform.openai.com/docs/guides/batch."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from raylens.deployments.api.batches import PATHS

_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    path: str
    body: dict[str, Any]


class LineError(ValueError):
    """A line is no request of a batch. `number`: the line's, from 1; None: the whole file. `code`, `field`: for
    programs."""

    def __init__(self, message: str, code: str, field: str | None = None) -> None:
        super().__init__(message)
        self.number: int | None = None
        self.code = code
        self.field = field


class RequestLines:
    """The place of each request in a file. `offsets`: bytes before its line, by `custom_id`, in order. `errors`: of
    lines that are no requests."""

    def __init__(self, lines: Iterable[bytes], paths: Collection[str] = PATHS, *, max_errors: int = 1) -> None:
        """`paths`: those that a request may have. Reads on until it has found `max_errors`."""
        self.offsets: dict[str, int] = {}
        self.errors: list[LineError] = []
        self._numbers: dict[str, int] = {}
        offset = 0
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    self._add(request_in(line, paths).custom_id, number, offset)
            except LineError as error:
                error.number = number
                self.errors.append(error)
                if len(self.errors) == max_errors:
                    return
            offset += len(line)
        if not self.offsets and not self.errors:
            self.errors.append(LineError("has no requests", "empty_batch"))

    def _add(self, custom_id: str, number: int, offset: int) -> None:
        if custom_id in self._numbers:
            reason = f"custom_id {custom_id[:100]!r} is that of line {self._numbers[custom_id]}"
            raise LineError(reason, "duplicate_custom_id", "custom_id")
        self._numbers[custom_id], self.offsets[custom_id] = number, offset


def request_in(line: bytes, paths: Collection[str] = PATHS) -> BatchRequest:
    """Raises LineError."""
    try:
        given = from_json(line)
    except ValueError as error:
        raise LineError(f"not valid JSON: {error}", "invalid_json_line") from error
    if not isinstance(given, dict):
        raise LineError("not an object", "invalid_json_line")
    custom_id, path, body = given.get("custom_id"), given.get("url"), given.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        reason = f"custom_id has to be a text of at most {_MAX_ID_CHARS} characters"
        raise LineError(reason, "invalid_custom_id", "custom_id")
    if given.get("method", "POST") != "POST":
        raise LineError("method has to be POST", "invalid_method", "method")
    if not isinstance(path, str) or path not in paths:
        reason = f"url has to be {'one of ' * (len(paths) > 1)}{', '.join(paths)}, not {json.dumps(path)[:100]}"
        raise LineError(reason, "invalid_url", "url")
    if not isinstance(body, dict):
        raise LineError("body has to be an object", "invalid_body", "body")
    if body.get("stream") or body.get("background"):
        reason = "body: the answers of a batch come as a whole, without stream and background"
        raise LineError(reason, "invalid_body", "body")
    return BatchRequest(custom_id, path, body)
