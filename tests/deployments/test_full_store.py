"""The object store is full: Ray writes what is not in use to disk, and requests are answered as before."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from openai import OpenAI

from benchmarks.server_process import running_serve, tree_of
from tests.slow_encoder import answers_about, make_slow_checkpoint

ROOT = Path(__file__).parents[2]
SIDE = 700  # pixels; as tensors such a picture has 12 MB
NUM_PICTURES = 12
STORE_BYTES = 80 * 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[OpenAI, int]]:
    """A client of a server of its own, and the server's process."""
    args = {"model": make_slow_checkpoint(tmp_path, SIDE), "served_model_name": "small"}
    small = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(STORE_BYTES)}
    with mock.patch.dict("os.environ", small), running_serve(args) as (url, process):
        yield OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120), process.pid


@pytest.mark.slow
def test_a_full_store_costs_no_answer(server: tuple[OpenAI, int]) -> None:
    client, pid = server
    pictures = range(NUM_PICTURES)
    one_by_one = answers_about(client, pictures, SIDE)
    assert len(set(one_by_one)) > NUM_PICTURES // 2
    assert answers_about(client, pictures, SIDE, at_once=NUM_PICTURES, tail=b"another") == one_by_one
    assert spilled_bytes(pid) > STORE_BYTES / 2
    assert answers_about(client, pictures, SIDE, at_once=4) == one_by_one, "from what was written to disk"


def spilled_bytes(pid: int) -> int:
    """What the Ray of this server has written to disk."""
    commands = [Path(f"/proc/{one}/cmdline").read_text() for one in tree_of(pid)]
    (session,) = {found.group(1) for one in commands if (found := re.search(r"--session[-_]dir=([^\0]+)", one))}
    time.sleep(1)
    return sum(file.stat().st_size for file in Path(session).glob("ray_spilled_objects*/**/*") if file.is_file())
