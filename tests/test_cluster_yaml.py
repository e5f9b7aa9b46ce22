"""cluster.yaml and clusters/: Ray accepts the files, and their start commands do what the application relies on."""

import copy
import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from raylens.deployments.cluster.haproxy import haproxy_environment
from raylens.deployments.config import AppConfig
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT

ROOT = Path(__file__).parents[1]
FILES = ("cluster.yaml", "clusters/aws.yaml", "clusters/local.yaml")
CLOUDS = ("cluster.yaml", "clusters/aws.yaml")
NODES = {"cpu_node", "encode_node", "generate_node"}
"""The custom resources by which stages find their nodes."""
LEFT_OVER = "of the last time.sock"
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return config


@pytest.fixture(params=FILES)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


@dataclass(frozen=True)
class Start:
    """How a node's start commands called `ray start`, after a session that left files behind."""

    cluster: dict[str, Any]
    is_head: bool
    home: Path
    folder: str
    arguments: list[str]
    environment: dict[str, str]
    deploys: list[str]


@pytest.fixture(scope="module", params=product(FILES, START_COMMANDS), ids="-".join)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    file, commands = request.param
    cluster, home = read(file), tmp_path_factory.mktemp("home")
    (home / ".raylens" / "uploads-0").mkdir(parents=True)
    (home / ".raylens" / LEFT_OVER).touch()
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("copied by rsync, with its mode")
    (home / ".ray" / "auth_token").chmod(0o644)
    started = run_with_fake_ray(cluster[commands], home)
    return Start(cluster, commands.startswith("head"), home, **started)


def test_every_file_is_tested() -> None:
    assert {"cluster.yaml", *(f"clusters/{file.name}" for file in (ROOT / "clusters").iterdir())} == set(FILES)


def validate(cluster: dict[str, Any]) -> None:
    """What `ray up` does before it talks to the cloud."""
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    validate(cluster)


def test_ray_refuses_a_misspelt_key(cluster: dict[str, Any]) -> None:
    cluster["idle_timeout_minute"] = 1
    with pytest.raises(Exception, match="'idle_timeout_minute' was unexpected"):
        validate(cluster)


def test_ray_refuses_a_misspelt_key_of_a_node_type(cloud: dict[str, Any]) -> None:
    cloud["available_node_types"]["generate_worker"]["min_worker"] = 1
    with pytest.raises(Exception, match="'min_worker' was unexpected"):
        validate(cloud)


def test_ray_refuses_a_fraction_of_a_resource(cloud: dict[str, Any]) -> None:
    cloud["available_node_types"]["generate_worker"]["resources"]["GPU"] = 0.5
    with pytest.raises(Exception, match=r"0\.5 is not of type 'integer'"):
        validate(cloud)


def test_every_stage_has_a_node_type(cloud: dict[str, Any]) -> None:
    types = cloud["available_node_types"]
    head = types.pop(cloud["head_node_type"])
    assert set(head["resources"]) == {"CPU"}
    assert [set(node["resources"]) & NODES for node in types.values()] == [{name} for name in sorted(NODES)]
    gpus = {name: types[f"{name}_worker"]["resources"].get("GPU", 0) for name in ("cpu", "encode", "generate")}
    assert gpus["cpu"] == 0 < gpus["encode"] < gpus["generate"]
    assert all(node["min_workers"] < node["max_workers"] for node in types.values())
    assert cloud["max_workers"] == sum(node["max_workers"] for node in types.values())


def test_the_settings_that_the_docs_show_name_nodes_that_every_file_has() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    config = AppConfig.model_validate(yaml.safe_load(shown))
    stages = (config.ingress, config.shared, config.preprocess, config.encode, config.generate)
    assert {name for stage in stages for name in stage.resources} == NODES
    for name in FILES:
        assert [node for node in NODES if node not in _without_comments((ROOT / name).read_text())] == []
    for name in CLOUDS:
        gpus = read(name)["available_node_types"]["generate_worker"]["resources"]["GPU"]
        assert gpus % config.generate.tensor_parallel_size == 0


def test_machines_that_are_there_are_told_apart_by_their_address(tmp_path: Path) -> None:
    local = read("clusters/local.yaml")
    addresses = [local["provider"]["head_ip"], *local["provider"]["worker_ips"]]
    assert len(set(addresses)) == 4

    def resources(commands: str, address: str) -> dict[str, int]:
        start = run_with_fake_ray(local[commands], tmp_path, address=address)
        (given,) = [one for one in start["arguments"] if one.startswith("--resources=")]
        found: dict[str, int] = json.loads(given.partition("=")[2])
        return found

    head, *workers = addresses
    assert set(resources("head_start_ray_commands", head)) == {"cpu_node"}
    kinds = [resources("worker_start_ray_commands", address) for address in workers]
    assert [list(kind) for kind in kinds] == [["encode_node"], ["generate_node"], ["cpu_node"]]
    assert resources("worker_start_ray_commands", f"{workers[0]}0") == {"cpu_node": 100}


def test_the_head_brings_the_application_once_ray_runs(start: Start) -> None:
    assert ("--head" in start.arguments) == start.is_head
    assert start.deploys == (["deploy serve.yaml --host 0.0.0.0"] if start.is_head else [])


def test_the_autoscaler_is_the_one_that_updates_workers(start: Start) -> None:
    assert not start.is_head or start.environment["RAY_enable_autoscaler_v2"] == "0"


def test_ray_starts_with_the_same_environment_as_on_one_machine(start: Start) -> None:
    assert {name: start.environment.get(name) for name in RAY_ENVIRONMENT} == RAY_ENVIRONMENT


def test_haproxy_s_files_are_in_a_folder_of_the_user_alone(start: Start) -> None:
    folder = start.home / ".raylens"
    expected = haproxy_environment(folder)
    assert {name: start.environment.get(name) for name in expected} == expected
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / LEFT_OVER).exists()


def test_ray_asks_for_a_token_and_the_head_keeps_what_it_knows(start: Start) -> None:
    environment, folder = start.environment, start.home / ".raylens"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert start.cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert (environment.get("RAY_gcs_storage") == "rocksdb") == start.is_head
    assert (environment.get("RAY_gcs_storage_path") == str(folder / "gcs")) == start.is_head
    assert (folder / "uploads-0").is_dir(), "what clients sent stays"


def test_no_other_user_of_a_node_reads_the_token(start: Start) -> None:
    assert stat.S_IMODE((start.home / ".ray" / "auth_token").stat().st_mode) == 0o600


def test_every_shell_of_a_node_sends_the_token(cluster: dict[str, Any], tmp_path: Path) -> None:
    """`ray exec` starts one for its command."""
    for_shells = [command for command in cluster["setup_commands"] if ".bashrc" in command]
    (tmp_path / ".bashrc").touch()
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for command in [*for_shells, *for_shells]:
        subprocess.run(["bash", "-c", command], env=environment, check=True)
    lines = (tmp_path / ".bashrc").read_text().splitlines()
    assert lines == ['export PATH="$HOME/venv/bin:$PATH"', "export RAY_AUTH_MODE=token"]


def test_ray_starts_in_the_working_copy_with_its_metrics_on_a_fixed_port(start: Start) -> None:
    working_copy = next(iter(start.cluster["file_mounts"]))
    assert start.folder == working_copy.replace("~", str(start.home))
    assert "--metrics-export-port=8080" in start.arguments


def test_workers_join_the_port_that_the_head_listens_on(start: Start) -> None:
    (port,) = re.findall(r"--head --port=(\d+)", "\n".join(start.cluster["head_start_ray_commands"]))
    assert (f"--port={port}" if start.is_head else f"--address=head.invalid:{port}") in start.arguments


def test_every_node_installs_the_versions_that_the_tests_run_with(cluster: dict[str, Any]) -> None:
    (constraints,) = re.findall(r"pip install -c (\S+) -e \.$", "\n".join(cluster["setup_commands"]), re.M)
    assert cluster["file_mounts"]["~/raylens"] == "."
    assert (ROOT / constraints).is_file()


def test_every_node_can_compile_what_triton_writes(cluster: dict[str, Any]) -> None:
    """A kernel's launcher is a little C, with Python's headers."""
    (install,) = [command for command in cluster["setup_commands"] if "apt-get" in command and "install" in command]
    assert {"gcc", "python3-dev"} <= set(install.split())


def test_gpus_of_google_cloud_have_the_driver_that_the_docs_ask_for() -> None:
    (least,) = re.findall(r"NVIDIA's driver (\d+) or newer", (ROOT / "docs" / "clusters.md").read_text())
    types = read("cluster.yaml")["available_node_types"].values()
    images = [
        node["node_config"]["disks"][0]["initializeParams"]["sourceImage"]
        for node in types
        if "GPU" in node["resources"]
    ]
    drivers = [int(image.rpartition("-nvidia-")[2]) for image in images]
    assert len(drivers) == 2
    assert min(drivers) >= int(least)


def _without_comments(text: str) -> str:
    return re.sub(r"#.*", "", text)


def run_with_fake_ray(commands: list[str], home: Path, *, address: str = "192.0.2.1") -> dict[str, Any]:
    """Runs start commands as Ray does, each in a shell of its own, on a machine with an address, where no Ray runs.
    Returns how they called `ray start`, and `raylens deploy` after that."""
    (home / "bin").mkdir(exist_ok=True)
    (home / ".raylens" / "started").unlink(missing_ok=True)
    deploys = home / "deploys"
    deploys.write_text("")
    (home / "call").unlink(missing_ok=True)
    programs = {
        "ray": '[ "$1" = start ] || exit 0\nprintf "%s\\0" "$PWD" "$*" "$(env)" > "$HOME/call"',
        "raylens": f'[ "$1" = deploy ] && [ -e "$HOME/call" ] && echo "$*" >> {deploys} && exit 0\n'
        f'exec {sys.executable} -m raylens "$@"',
        "hostname": f'[ "$1" = -I ] && echo "{address} 2001:db8::1 "',
    }
    for name, script in programs.items():
        program = home / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    (home / "raylens").mkdir(exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}/usr/bin:/bin",
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
        "deploys": deploys.read_text().splitlines(),
    }
