"""The program that starts workers does what Ray's own program does. tests/deployments/test_worker_template.py forks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.workers import __file__ as workers_of_ray

from raylens.deployments.ray_internals import start_worker

OF_RAY = Path(workers_of_ray).with_name("setup_worker.py")
WORKER = """
import json, os, sys
print(json.dumps([sys.executable, sys.argv[1:], os.environ.get("COLOUR"), os.environ.get("HOME")]))
"""


def started_by(program: str | Path, context: dict[str, object] | None, worker: Path) -> list[object]:
    """Returns what the worker sees whom the program has started."""
    text = "" if context is None else json.dumps(context)
    options = [f"--serialized-runtime-env-context={text}", "--language=PYTHON"]
    command = [sys.executable, str(program), *options, str(worker), "--node-ip-address=127.0.0.1", "--x", "y z"]
    environment = {"HOME": "/at/home", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    seen: list[object] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize(
    "context",
    [None, {"env_vars": {"COLOUR": "${HOME}/blue"}, "py_executable": sys.executable}],
    ids=["no runtime environment", "variables"],
)
def test_a_worker_starts_as_by_ray_s_own_program(context: dict[str, object] | None, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    seen = started_by(start_worker.__file__, context, worker)
    assert seen == started_by(OF_RAY, context, worker)
    assert seen[1] == ["--node-ip-address=127.0.0.1", "--x", "y z"]


@pytest.mark.parametrize(
    ("context", "is_plain"),
    [
        ({}, True),
        ({"env_vars": {"A": "1"}, "command_prefix": [], "java_jars": [], "override_worker_entrypoint": None}, True),
        ({"py_executable": "/other/python"}, False),
        ({"command_prefix": ["nice"]}, False),
        ({"override_worker_entrypoint": "/worker.py"}, False),
    ],
)
def test_ray_starts_workers_whose_environment_has_more_than_variables(
    context: dict[str, object], is_plain: bool
) -> None:
    assert start_worker._is_plain(context) is is_plain
