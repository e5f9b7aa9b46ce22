"""The file of requests of `raylens batch`.

It may be larger than memory: its lines are read twice, first to check all of them, then each when it is sent."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raylens.deployments.batch.request_lines import BatchRequest, RequestLines, request_in

LEAST_PRIORITY = 1000
"""Requests of people go first."""


class BatchFileError(ValueError):
    """A file of a batch cannot be used. The message names the file and the line."""


class RequestFile:
    """`custom_ids`: of all requests, in order."""

    def __init__(self, file: Path) -> None:
        """Raises BatchFileError if a line is no request of a batch, or has the id of another one."""
        self._file = file
        try:
            with file.open("rb") as lines:
                found = RequestLines(lines)
        except OSError as error:
            raise BatchFileError(f"{file}: {error.strerror}") from error
        for wrong in found.errors:
            place = f"{file}" if wrong.number is None else f"{file}, line {wrong.number}:"
            raise BatchFileError(f"{place} {wrong}")
        self._offsets = found.offsets

    @property
    def custom_ids(self) -> list[str]:
        return list(self._offsets)

    def requests(self, without: set[str]) -> Iterator[BatchRequest]:
        """Yields the requests in order, but for those with these ids."""
        with self._file.open("rb") as lines:
            for custom_id, offset in self._offsets.items():
                if custom_id not in without:
                    lines.seek(offset)
                    request = request_in(lines.readline())
                    yield replace(request, body={"priority": LEAST_PRIORITY} | request.body)
