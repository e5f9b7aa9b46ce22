"""Connections of other users of the machine are closed beyond a number; a program that accepts all stands for Ray."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from raylens.deployments.cluster.other_users import MOST, bounded_connections, close_excess
from raylens.deployments.cluster.server_processes import marked, owned_processes
from tests.listening import NOBODY, connections_of_nobody
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]), dualstack_ipv6=sys.argv[1] == "::") as server:
    print(server.getsockname()[1], flush=True)
    kept = []
    while True:
        kept.append(server.accept()[0])
"""
NUM_OWN, NUM_FOREIGN = 30, 300


class Server:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._pid, self.port = process.pid, int(process.stdout.readline())

    def ends(self) -> int:
        """The connections that it has accepted."""
        return len(os.listdir(f"/proc/{self._pid}/fd")) - 4


@contextmanager
def server_at(folder: Path, host: str, family: socket.AddressFamily) -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER, host, str(int(family))]
    with marked(folder):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with owned_processes(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)])
def test_a_hundred_of_another_user_stay(folder: Path, host: str, family: socket.AddressFamily) -> None:
    with server_at(folder, host, family) as server, ExitStack() as own:
        for _ in range(NUM_OWN):
            own.enter_context(closing(socket.create_connection(("127.0.0.1", server.port))))
        with connections_of_nobody([server.port] * NUM_FOREIGN) as num_closed:
            wait_until(lambda: server.ends() == NUM_OWN + NUM_FOREIGN)
            told = set[tuple[int, int]]()
            close_excess(folder, public_port=server.port, told=told)
            close_excess(folder / "another", public_port=0, told=told)
            assert (num_closed(), told) == (0, set())

            def have_been_closed() -> bool:
                """A table may lack a row that is there (proc(5) has no snapshot), so one look may find too few."""
                close_excess(folder, public_port=0, told=told)
                return num_closed() >= NUM_FOREIGN - MOST

            wait_until(have_been_closed)
            assert (num_closed(), told) == (NUM_FOREIGN - MOST, {(NOBODY, server.port)})
            close_excess(folder, public_port=0, told=set())
            assert num_closed() == NUM_FOREIGN - MOST


def test_connections_are_counted_when_new_ones_could_be_too_many(folder: Path) -> None:
    checks = Mock(wraps=close_excess)
    with (
        patch("raylens.deployments.cluster.other_users.close_excess", checks),
        patch("raylens.deployments.cluster.other_users._LEAST_OFTEN_SECONDS", 1e9),
        server_at(folder, "127.0.0.1", socket.AF_INET) as server,
        bounded_connections(folder, public_port=0),
    ):
        wait_until(lambda: checks.call_count == 1)
        with connections_of_nobody([server.port] * (MOST - 10)) as num_closed:
            wait_until(lambda: server.ends() == MOST - 10)
            time.sleep(0.5)
            assert checks.call_count == 1, "fewer than the most were accepted since"
            with connections_of_nobody([server.port] * 40) as num_more_closed:
                wait_until(lambda: num_closed() + num_more_closed() == 30)
                assert checks.call_count > 1
