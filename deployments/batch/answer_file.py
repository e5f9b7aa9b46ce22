"""The file of a batch's answers: a JSON line for each request that has been answered, in any order.

It is also the record of what is done: a run that was killed goes on with the requests that have no whole line."""

import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, Self

from pydantic_core import from_json

from raylens.deployments.batch.request_file import BatchFileError


class AnswerFile:
    """Use it as a context manager. `done`: the ids of the answered requests. `num_failed`: those with an error."""

    def __init__(self, file: Path, custom_ids: Collection[str]) -> None:
        """`custom_ids`: of the requests that it has answers to."""
        self._path = file
        self._custom_ids = frozenset(custom_ids)
        self.done: set[str] = set()
        self.num_failed = 0

    def __enter__(self) -> Self:
        """Reads what is there already. Raises BatchFileError if that has answers to other requests, or if another run
        writes to it."""
        try:
            self._file: IO[bytes] = self._path.open("ab+", buffering=0)
        except OSError as error:
            raise BatchFileError(f"{self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except BlockingIOError:
            self._file.close()
            raise BatchFileError(f"another `raylens batch` writes to {self._path}") from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _take_over(self) -> None:
        num_whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # of a run that was killed
                num_whole += len(line)
                try:
                    answer = from_json(line)
                    self._count(answer["custom_id"], answer["response"]["status_code"])
                except (ValueError, TypeError, KeyError) as error:
                    reason = "is not an answer to one of these requests"
                    raise BatchFileError(f"{self._path}, line {number} {reason}; name another file") from error
        self._file.truncate(num_whole)

    def _count(self, custom_id: str, status: int) -> None:
        if custom_id not in self._custom_ids or custom_id in self.done:
            raise KeyError(custom_id)
        self.done.add(custom_id)
        self.num_failed += status != 200

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """Appends an answer. Raises RuntimeError if the file has no room for it."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        answer = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        num_bytes = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(0, "no room for another answer")
        except OSError as error:
            self._file.truncate(num_bytes)
            raise RuntimeError(f"{self._path}: {error.strerror}; the same command goes on from here") from error
        self._count(custom_id, status)
