"""`raylens serve` leaves nothing behind, whatever ends it."""

import os
import re
import signal

import pytest

from raylens.deployments.launch.local_cluster import free_port
from tests.ended_servers import EVENT, Server, Streams, serving

NUM_STREAMS = 8


def ends_in(server: Server, seconds: float) -> int:
    """Its exit status. Nothing of it is left."""
    assert server.seconds_to_end(seconds) < seconds, "something is left"
    assert server.port_is_free()
    return server.process.wait()


def test_streams_that_are_open_when_a_shell_ends_its_job_get_an_event() -> None:
    """With the default drain time. A shorter one hides which of Generate and the ingress Ray Serve kills first."""
    with serving() as server:
        server.wait_for_line("curl ")
        with Streams(server.url, NUM_STREAMS) as streams:
            server.send(signal.SIGTERM, "group")
        assert streams.ends == [EVENT] * NUM_STREAMS
        assert ends_in(server, 15) == 0


def test_after_a_signal_to_all_of_its_processes_and_after_a_kill_the_next_start_finds_the_port_free() -> None:
    port = free_port()
    with serving(port=port) as server:
        server.wait_for_line("curl ")
        server.send(signal.SIGTERM, "all")
        assert ends_in(server, 15) == 0
    with serving(port=port) as server:
        server.wait_for_line("loading")
        server.send(signal.SIGKILL, "process")
        assert ends_in(server, 5) == -signal.SIGKILL


@pytest.mark.parametrize("program", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_without_ray_it_ends_and_says_why(program: str) -> None:
    with serving() as server:
        server.wait_for_line("curl ")
        os.kill(server.pid_of(program), signal.SIGKILL)
        assert ends_in(server, 15) == 1
        assert server.process.stderr is not None
        last = server.process.stderr.read().splitlines()[-1]
    assert re.fullmatch(rf"raylens: Ray has ended: its process {program} was ended by SIGKILL", last)
