"""The processes of a server end with their owner, in whatever way it ends; sleeping programs stand for them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.cluster.server_processes import kill_orphans, marked, owned_processes
from tests.replicas import children
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
SLEEP = ("sh", "-c", "trap '' TERM; exec sleep 60")
OWNER = """
import subprocess, sys, time
from pathlib import Path
from raylens.deployments.cluster.server_processes import marked, owned_processes
with owned_processes(Path(sys.argv[1])):
    with marked(Path(sys.argv[1])):
        server = subprocess.Popen(sys.argv[2:], start_new_session=True)
    print(server.pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def sleeping(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that SIGTERM does not end."""
    with subprocess.Popen(SLEEP, start_new_session=True, **options) as process:
        try:
            # Between two programs a process has no environment for a moment.
            wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"))
            yield process
        finally:
            process.kill()


@contextmanager
def owner_of(folder: Path) -> Iterator[tuple[int, int, int]]:
    """Pids of an owner, its keeper and its server's process."""
    command = [sys.executable, "-c", OWNER, str(folder), *SLEEP]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            process = int(owner.stdout.readline())
            (keeper,) = (pid for pid in children(owner.pid) if pid != process)
            # By then it ignores signals and waits for the lock.
            wait_until(lambda: "lock" in Path(f"/proc/{keeper}/wchan").read_text())
            yield owner.pid, keeper, process
        finally:
            owner.kill()


def lives(pid: int) -> bool:
    """A process that nobody has waited for has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_none_is_left_behind_the_block_and_no_other_is_ended(tmp_path: Path) -> None:
    with sleeping() as other, ExitStack() as stack:
        with owned_processes(tmp_path):
            with marked(tmp_path):
                server = stack.enter_context(sleeping())
            unmarked = stack.enter_context(sleeping())
            assert server.poll() is None
        assert server.wait(2) == -signal.SIGKILL
        assert (other.poll(), unmarked.poll()) == (None, None)


def test_they_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    with owner_of(tmp_path) as (owner, keeper, process):
        os.kill(keeper, signal.SIGTERM)  # as systemd sends it to all
        os.kill(keeper, signal.SIGHUP)
        time.sleep(0.1)
        assert lives(process)
        os.kill(owner, signal.SIGKILL)
        wait_until(lambda: not lives(process), 5)


def test_a_start_ends_orphans_and_leaves_servers_alone_that_have_an_owner(tmp_path: Path) -> None:
    orphaned, owned = tmp_path / "orphaned", tmp_path / "owned"
    orphaned.mkdir()
    owned.mkdir()
    with owner_of(orphaned) as (owner, keeper, orphan), owner_of(owned) as (_, _, process):
        os.kill(keeper, signal.SIGKILL)
        os.kill(owner, signal.SIGKILL)
        wait_until(lambda: not lives(owner))
        assert lives(orphan)
        kill_orphans()
        wait_until(lambda: not lives(orphan), 5)
        assert lives(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_start_leaves_other_users_processes_alone(tmp_path: Path) -> None:
    with owned_processes(tmp_path):
        pass
    with marked(tmp_path), sleeping(user=65534) as another, sleeping() as own:
        kill_orphans()
        assert own.wait(2) == -signal.SIGKILL
        assert another.poll() is None


def test_a_server_whose_folder_is_out_of_sight_is_left_alone(tmp_path: Path) -> None:
    """As that of a container of this machine."""
    with marked(tmp_path / "elsewhere"), sleeping() as process:
        kill_orphans()
        assert process.poll() is None
