"""A load is over when no process that loads works any more."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raylens.deployments.launch.app_lifetime import LoadProgress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
QUIET_SECONDS = 1.0
IDLE = "import time; time.sleep(60)"
COMPUTES = "while True: pass"
READS = "import sys, time\nwhile True: open(sys.argv[1], 'rb').read(); time.sleep(0.2)"


@contextmanager
def running(title: str, code: str, *arguments: str) -> Iterator[None]:
    """Runs Python code in a process below a child of this one, under the title that Ray would give it."""
    script = f'exec -a \'{title}\' {sys.executable} -c "$0" "$@"'
    command = ["bash", "-c", 'bash -c "$@" & echo $!; wait', "-", script, code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield
        finally:
            subprocess.run(["kill", "-9", str(pid)], check=True)


def is_over_after(seconds: float) -> bool:
    progress = LoadProgress(QUIET_SECONDS)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if progress.is_over():
            return True
        time.sleep(0.1)
    return False


def test_without_a_process_it_is_over() -> None:
    assert is_over_after(5)


@pytest.mark.parametrize("title", ["ray::ServeReplica:raylens:Generate", "ray::GenerateRank.load"])
def test_it_goes_on_while_a_replica_or_a_rank_computes(title: str) -> None:
    with running(title, COMPUTES):
        assert not is_over_after(3)


def test_it_goes_on_while_a_replica_reads(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(2**20))
    with running("ray::ServeReplica:raylens:Generate", READS, str(weights)):
        assert not is_over_after(3)


@pytest.mark.parametrize(
    ("title", "code"), [("ray::ServeReplica:raylens:Generate", IDLE), ("ray::ServeController", COMPUTES)]
)
def test_it_is_over_when_no_replica_does_anything(title: str, code: str) -> None:
    with running(title, code):
        time.sleep(0.5)  # Python has started
        assert is_over_after(5)
