"""A server whose processes may open few files says so at its start, and uses those that it may open."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from raylens.deployments.ray_internals.haproxy_config import ConnectionLimits

ROOT = Path(__file__).parents[2]
START = """
import resource
from raylens.deployments.launch import local_cluster, node

class Started(Exception):
    pass

def start(command, *others):
    if command == ["stop"]:
        return 0
    print("may open", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    raise Started

local_cluster.worker_template = node._ray = start
node._ray_runs = lambda: False
try:
    {start}
except Started:
    pass
"""
OF_ONE_MACHINE = "local_cluster.local_ray(host='127.0.0.1', port=1, num_cpus=1).__enter__()"
OF_A_NODE = "node.start_node([])"


def said_at_start(start: str, soft: int, hard: int, home: Path) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run(
        [sys.executable, "-c", START.format(start=start)],
        cwd=ROOT,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("start", [OF_ONE_MACHINE, OF_A_NODE], ids=["serve", "node"])
def test_few_files_are_all_used_and_the_start_says_how_many_connections_that_leaves(start: str, tmp_path: Path) -> None:
    said = said_at_start(start, 256, 512, tmp_path)
    assert "may open 512\n" in said
    assert "takes 16 connections at a time instead of 8192, because its processes may open 512 files" in said
    assert "Allow them 16896" in said


def test_enough_files_are_no_matter(tmp_path: Path) -> None:
    said = said_at_start(OF_ONE_MACHINE, 1024, 16896, tmp_path)
    assert "may open 16896" in said
    assert "warning" not in said


def test_the_files_that_the_warning_names_are_enough() -> None:
    assert ConnectionLimits.within(8192, ConnectionLimits.files_for(8192)).total == 8192
