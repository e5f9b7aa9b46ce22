"""cluster.yaml: Ray accepts it, and its start commands do what the application relies on."""

import copy
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deployments.haproxy import haproxy_environment
from deployments.ray_environment import RAY_ENVIRONMENT

ROOT = Path(__file__).parents[1]
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture
def cluster() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return config


def validate(cluster: dict[str, Any]) -> None:
    """What `ray up` does before it talks to the cloud."""
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    validate(cluster)


def test_ray_refuses_a_misspelt_key(cluster: dict[str, Any]) -> None:
    cluster["idle_timeout_minute"] = 1
    with pytest.raises(Exception, match="'idle_timeout_minute' was unexpected"):
        validate(cluster)


def test_ray_refuses_a_misspelt_key_of_a_node_type(cluster: dict[str, Any]) -> None:
    cluster["available_node_types"]["gpu_worker"]["min_worker"] = 1
    with pytest.raises(Exception, match="'min_worker' was unexpected"):
        validate(cluster)


def test_ray_refuses_a_fraction_of_a_resource(cluster: dict[str, Any]) -> None:
    cluster["available_node_types"]["gpu_worker"]["resources"]["GPU"] = 0.5
    with pytest.raises(Exception, match=r"0\.5 is not of type 'integer'"):
        validate(cluster)


def test_every_stage_has_a_node_type(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert "GPU" not in head["resources"]
    assert sorted("GPU" in node["resources"] for node in types.values()) == [False, True]
    assert all(node["min_workers"] < node["max_workers"] for node in types.values())
    assert cluster["max_workers"] == sum(node["max_workers"] for node in types.values())


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_ray_starts_with_the_same_environment_as_on_one_machine(
    cluster: dict[str, Any], commands: str, tmp_path: Path
) -> None:
    environment = run_with_fake_ray(cluster[commands], tmp_path)["environment"]
    assert {name: environment.get(name) for name in RAY_ENVIRONMENT} == RAY_ENVIRONMENT


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_haproxy_s_files_are_in_a_folder_of_the_user_alone(
    cluster: dict[str, Any], commands: str, tmp_path: Path
) -> None:
    left_over = tmp_path / ".raylens" / "of the last time.sock"
    left_over.parent.mkdir()
    left_over.touch()
    environment = run_with_fake_ray(cluster[commands], tmp_path)["environment"]
    folder = tmp_path / ".raylens"
    expected = haproxy_environment(folder)
    assert {name: environment.get(name) for name in expected} == expected
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not left_over.exists()


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_ray_asks_for_a_token_and_the_head_keeps_what_it_knows(
    cluster: dict[str, Any], commands: str, tmp_path: Path
) -> None:
    uploads = tmp_path / ".raylens" / "uploads-0"
    uploads.mkdir(parents=True)
    environment = run_with_fake_ray(cluster[commands], tmp_path)["environment"]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    is_head = commands.startswith("head")
    assert (environment.get("RAY_gcs_storage") == "rocksdb") == is_head
    assert (environment.get("RAY_gcs_storage_path") == str(tmp_path / ".raylens" / "gcs")) == is_head
    assert uploads.is_dir(), "what clients sent stays"


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_ray_starts_in_the_working_copy_with_its_metrics_on_a_fixed_port(
    cluster: dict[str, Any], commands: str, tmp_path: Path
) -> None:
    working_copy = next(iter(cluster["file_mounts"]))
    start = run_with_fake_ray(cluster[commands], tmp_path)
    assert start["folder"] == working_copy.replace("~", str(tmp_path))
    assert "--metrics-export-port=8080" in start["arguments"]


def test_workers_join_the_port_that_the_head_listens_on(cluster: dict[str, Any], tmp_path: Path) -> None:
    head, worker = (run_with_fake_ray(cluster[commands], tmp_path)["arguments"] for commands in START_COMMANDS)
    (port,) = re.findall(r"--port=(\d+)", " ".join(head))
    assert "--head" in head
    assert f"--address=head.invalid:{port}" in worker


def test_every_node_installs_the_versions_that_the_tests_run_with(cluster: dict[str, Any]) -> None:
    (constraints,) = re.findall(r"pip install -c (\S+) -e \.$", "\n".join(cluster["setup_commands"]), re.M)
    assert cluster["file_mounts"]["~/raylens"] == "."
    assert (ROOT / constraints).is_file()


def run_with_fake_ray(commands: list[str], home: Path) -> dict[str, Any]:
    """Runs start commands as Ray does, each in a shell of its own, and returns how they called `ray start`."""
    fake_ray = home / "bin" / "ray"
    fake_ray.parent.mkdir(exist_ok=True)
    fake_ray.write_text('#!/bin/sh\n[ "$1" = start ] || exit 0\nprintf "%s\\0" "$PWD" "$*" "$(env)" > "$HOME/call"\n')
    fake_ray.chmod(0o755)
    raylens = home / "bin" / "raylens"
    raylens.write_text(f'#!/bin/sh\nexec {sys.executable} -m deployments "$@"\n')
    raylens.chmod(0o755)
    (home / "raylens").mkdir(exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": f"{fake_ray.parent}{os.pathsep}/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "RAY_HEAD_IP": "head.invalid",
    }
    for command in commands:
        subprocess.run(["bash", "-c", command], env=environment, cwd=home, check=True, timeout=30)
    folder, arguments, lines, _ = (home / "call").read_text().split("\0")
    return {
        "folder": folder,
        "arguments": arguments.split(),
        "environment": dict(line.partition("=")[::2] for line in lines.splitlines()),
    }
