"""`raylens deploy`: what it refuses before it sends anything, and what it brings to a cluster."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml

from raylens.deployments.launch.app_lifetime import end_app
from raylens.deployments.launch.config_file import ConfigError
from raylens.deployments.launch.deploy import check_host, read_serve_file
from raylens.deployments.launch.local_cluster import APP_NAME
from tests.checkpoint_copies import copy_checkpoint

ROOT = Path(__file__).parents[2]


def document(**args: Any) -> dict[str, Any]:
    return {"applications": [{"name": APP_NAME, "import_path": "raylens.deployments.app:build_app", "args": args}]}


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_folders_are_sent_with_their_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    media = {"local_root": "checkpoints/pictures"}
    (application,) = read_serve_file(
        written(tmp_path, document(model="checkpoints/shapes", media=media)), None
    ).applications
    assert application.args == {
        "model": str(ROOT / "checkpoints" / "shapes"),
        "media": {"local_root": str(ROOT / "checkpoints" / "pictures")},
    }


def test_the_host_of_the_command_line_goes_before_the_file_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = {"host": "127.0.0.1", "port": 8123}
    file = written(tmp_path, {**document(), "http_options": options})
    assert read_serve_file(file, None).http_options.host == "127.0.0.1"
    read = read_serve_file(file, "0.0.0.0").http_options
    assert (read.host, read.port) == ("0.0.0.0", 8123)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"http_option": {}}, r"serve\.yaml: http_option: Ray Serve has no such field"),
        ({"http_options": {"prt": 1}}, r"serve\.yaml: http_options\.prt: Ray Serve has no such field"),
        ({"http_options": {"port": "x"}}, r"serve\.yaml: http_options\.port: Input should be a valid integer"),
        ({"applications": [document()["applications"][0] | {"route": "/"}]}, r"applications\.0\.route: Ray Serve has"),
        (document(modle="x"), r"line \d+: modle: Extra inputs are not permitted"),
        ({"applications": []}, r"serve\.yaml: not a Serve config file with one application"),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_serve_file(written(tmp_path, document() | changed), None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "LOCALHOST.", "::1"])
def test_loopback_is_refused_where_there_are_other_nodes(host: str) -> None:
    check_host(host, 1)
    with pytest.raises(ConfigError, match=rf"http_options\.host: {host} .* has 2: take 0\.0\.0\.0"):
        check_host(host, 2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "head.internal"])
def test_other_addresses_are_good_for_any_number_of_nodes(host: str) -> None:
    check_host(host, 7)


Deploy = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def deploy(tmp_path: Path, ray_port: int) -> Iterator[Deploy]:
    """Runs `raylens deploy` with settings, on the cluster of this process."""
    address = ray.get_runtime_context().gcs_address

    def run(*arguments: str, port: int = ray_port, **args: Any) -> "subprocess.CompletedProcess[str]":
        args["updates"] = {"drain_seconds": 2}
        file = written(tmp_path, {**document(**args), "http_options": {"host": "127.0.0.1", "port": port}})
        command = [sys.executable, "-m", "raylens", "deploy", str(file), *arguments]
        environment = os.environ | {"RAY_ADDRESS": address}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
        )

    yield run
    end_app(APP_NAME)


@pytest.mark.slow
def test_it_tells_each_change_until_all_is_ready_and_new_settings_come_the_same_way(
    deploy: Deploy, ray_port: int, tmp_path: Path
) -> None:
    first = deploy(ingress={"num_cpus": 0.1})
    assert (first.returncode, first.stderr) == (0, "")
    lines = first.stdout.splitlines()
    assert lines[0] == f"{tmp_path}/serve.yaml: sent to the cluster, which has 1 node"
    assert "Encode: starting, 0 of 1 replicas" in lines
    assert "Encode: ready, 1 of 1 replicas" in lines
    assert "0 of 0" not in first.stdout
    assert lines[-1].startswith("every stage is ready after ")
    assert len(lines) == len(set(lines)), "what has not changed is not said again"
    assert httpx.get(f"http://127.0.0.1:{ray_port}/health").status_code == 200

    again = deploy(ingress={"num_cpus": 0.1})
    assert again.returncode == 0
    assert "starting" not in again.stdout
    assert "updating" not in again.stdout

    changed = deploy(ingress={"num_cpus": 0.1}, encode={"num_cpus": 0.5})
    assert changed.returncode == 0
    assert any(line.startswith("Encode: updating, 1 of 2 replicas") for line in changed.stdout.splitlines())
    assert httpx.get(f"http://127.0.0.1:{ray_port}/health").status_code == 200

    at_once = deploy("--no-wait", ingress={"num_cpus": 0.1})
    assert (at_once.returncode, len(at_once.stdout.splitlines())) == (0, 1)

    other_port = deploy(port=ray_port + 1)
    assert other_port.returncode == 2
    assert f"http_options.port: {ray_port + 1} takes a new start of Ray Serve" in other_port.stderr
    assert httpx.get(f"http://127.0.0.1:{ray_port}/health").status_code == 200


def test_a_stage_that_does_not_start_ends_it_with_the_stage_s_own_error(
    deploy: Deploy, shapes: str, tmp_path: Path
) -> None:
    model = copy_checkpoint(shapes, tmp_path, lambda name: None if "projector.linear_1.bias" in name else name)
    failed = deploy(model=model)
    assert failed.returncode == 1
    assert failed.stderr.startswith("raylens: Encode did not start: ValueError: ")
    assert failed.stderr.endswith("lacks weights of the vision half: ['model.multi_modal_projector.linear_1.bias']\n")
    assert failed.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_wait_ends_when_its_time_is_over_and_says_who_is_late(deploy: Deploy) -> None:
    late = deploy("--timeout", "10", encode={"num_gpus": 1})
    lacking = "Encode: starting, 0 of 1 replicas; waits for 1 GPU, and the cluster has none"
    assert late.returncode == 1
    assert late.stderr.startswith("raylens: the time is over, and the deployment goes on: ")
    assert lacking in late.stdout, "before the time is over"
    assert lacking in late.stderr
