"""`raylens serve` leaves nothing behind, whatever ends it."""

import os
import re
import signal

import pytest

from tests.ended_servers import EVENT, Streams, serving

NUM_STREAMS = 8


def test_streams_that_are_open_when_a_shell_ends_its_job_get_an_event() -> None:
    """With the default drain time. A shorter one hides which of Generate and the ingress Ray Serve kills first."""
    with serving() as server:
        server.wait_for_line("curl ")
        with Streams(server.url, NUM_STREAMS) as streams:
            server.send(signal.SIGTERM, "group")
        assert streams.ends == [EVENT] * NUM_STREAMS
        assert server.ends_in(15) == 0


@pytest.mark.slow
def test_a_kill_during_the_start_leaves_nothing() -> None:
    """tests/deployments/test_json_log.py ends a server by a signal to all of its processes."""
    with serving() as server:
        server.wait_for_line("loading")
        server.send(signal.SIGKILL, "process")
        assert server.ends_in(5) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_without_ray_it_ends_and_says_why(program: str) -> None:
    with serving() as server:
        server.wait_for_line("curl ")
        os.kill(server.pid_of(program), signal.SIGKILL)
        assert server.ends_in(15) == 1
        assert server.process.stderr is not None
        last = server.process.stderr.read().splitlines()[-1]
    assert re.fullmatch(rf"raylens: Ray has ended: its process {program} was ended by SIGKILL", last)
