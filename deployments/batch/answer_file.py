"""The file of a batch's answers: a JSON line for each request that has been answered, in any order.

It is also the record of what is done: a run that was killed goes on with the requests that have no whole line."""

import fcntl
import json
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, Self

from pydantic_core import from_json

from raylens.deployments.batch.request_file import BatchFileError
from raylens.deployments.item_store.line_file import append_line, whole_lines


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
        for number, line in enumerate(whole_lines(self._path), start=1):
            try:
                answer = from_json(line)
                self._count(answer["custom_id"], answer["response"]["status_code"])
            except (ValueError, TypeError, KeyError) as error:
                reason = "is not an answer to one of these requests"
                raise BatchFileError(f"{self._path}, line {number} {reason}; name another file") from error

    def _count(self, custom_id: str, status: int) -> None:
        if custom_id not in self._custom_ids or custom_id in self.done:
            raise KeyError(custom_id)
        self.done.add(custom_id)
        self.num_failed += status != 200

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """Appends an answer. Raises RuntimeError if the file has no room for it."""
        try:
            append_line(self._file, answer_line(custom_id, status, request_id, body))
        except OSError as error:
            raise RuntimeError(f"{self._path}: {error.strerror}; the same command goes on from here") from error
        self._count(custom_id, status)


def answer_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """Returns the line of an answer in the form of OpenAI's Batch API. `status`: of HTTP. `body`: of the answer."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    answer = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"
