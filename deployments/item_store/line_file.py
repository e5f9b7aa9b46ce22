"""Files of whole lines, to which a process that may be killed at any time appends."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def append_line(file: IO[bytes], line: bytes) -> None:
    """`file`: opened for appending, without a buffer. Raises OSError without room; the file is then as before."""
    num_bytes = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(0, "no room for another line")
    except OSError:
        file.truncate(num_bytes)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines. Then cuts off a last one without an end: the process that wrote it was killed."""
    num_whole = 0
    with path.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            num_whole += len(line)
            yield line
        lines.truncate(num_whole)
