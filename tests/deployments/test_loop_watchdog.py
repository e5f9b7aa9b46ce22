"""A process whose event loop stands still ends, and Ray Serve replaces the replica."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.app_lifetime import end_app
from raylens.deployments.replica_start import start_replica
from raylens.deployments.server_log import FILE_VARIABLE
from tests.waiting import wait_until

SPIN = "while True: pass"
HOLD_THE_LOCK = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"


@pytest.mark.parametrize("stuck_in", [SPIN, HOLD_THE_LOCK])
def test_a_process_whose_loop_stands_still_says_where_and_ends(stuck_in: str) -> None:
    program = f"""
        import asyncio
        from raylens.deployments.replica_start import end_when_stuck

        async def stand_still():
            {stuck_in}

        async def main():
            end_when_stuck(2, limit_s=1.0)
            await asyncio.sleep(1.5)  # a loop that turns is left alone
            print("still here", flush=True)
            await stand_still()

        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "still here\n")
    assert "in stand_still" in ended.stderr


class Stuck:
    """Starts as every deployment does."""

    def __init__(self) -> None:
        start_replica("stuck", AppConfig(model="none"))

    async def pid(self) -> int:
        return os.getpid()

    async def stand_still(self) -> None:
        while True:
            pass


@pytest.mark.slow
def test_a_replica_whose_loop_stands_still_is_replaced(ray_port: int) -> None:
    deployment = serve.deployment(Stuck, ray_actor_options={"num_cpus": 0.1}, health_check_period_s=1.0)
    handle = serve.run(deployment.bind(), name="stuck", route_prefix=None)
    try:
        first = handle.pid.remote().result(timeout_s=10)
        with pytest.raises((RayError, RayServeException)):
            handle.stand_still.remote().result(timeout_s=60)
        wait_until(lambda: not Path(f"/proc/{first}").exists())
        assert handle.pid.remote().result(timeout_s=60) != first
        assert "in stand_still" in Path(os.environ[FILE_VARIABLE]).read_text()
    finally:
        end_app("stuck")
