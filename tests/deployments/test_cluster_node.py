"""`raylens node`: what starts Ray anew on a node, and what does not."""

import os
from pathlib import Path

import pytest

from raylens.deployments.launch.node import kind_of_start, start_ray

FILES = (
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
    "cpu_kernels/csrc/activation.h",
    "cpu_kernels/library.py",
    "deployments/app.py",
    "deployments/endpoint/page/shared/elements.js",
    "deployments/endpoint/page/operator/operator.html",
    "checkpoints/shapes/model.safetensors",
    "modeling/families.py",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small working copy."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    return tmp_path


@pytest.mark.parametrize(
    ("statuses", "ran"),
    [
        ([0], ["start"]),
        ([1, 0], ["start", "stop", "start"]),
        ([1, 1, 1, 0], ["start", "stop", "start", "stop", "start"]),
        ([2, 0], ["start"]),
    ],
    ids=["starts", "starts the second time", "does not start", "wrong arguments"],
)
def test_a_start_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int], ran: list[str]
) -> None:
    """With a program in place of `ray`, whose starts end with these statuses."""
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    program = tmp_path / "ray"
    program.write_text(
        f"""#!/bin/sh
cd {tmp_path}
echo "$@" >> ran
test "$1" = start || exit 0
status=$(head -n 1 statuses)
sed -i 1d statuses
exit $status
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert start_ray(["--head"], os.environ) == statuses[min(len(statuses), ran.count("start")) - 1]
    assert [line.split()[0] for line in (tmp_path / "ran").read_text().splitlines()] == ran
    assert (tmp_path / "ran").read_text().startswith("start --head\n")


def test_the_files_are_there() -> None:
    own = Path(__file__).parents[2]
    assert [name for name in FILES if not (own / name).is_file()] == []


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_that_the_node_runs_starts_ray_anew(root: Path, name: str) -> None:
    before = kind_of_start(["--head"], root)
    (root / name).write_text("new")
    assert kind_of_start(["--head"], root) != before


def test_a_file_that_comes_goes_or_has_another_name_starts_ray_anew(root: Path) -> None:
    kinds = [kind_of_start([], root)]
    page = root / "deployments" / "endpoint" / "page"
    (page / "new.css").write_text("new")
    kinds.append(kind_of_start([], root))
    (page / "new.css").rename(page / "newer.css")
    kinds.append(kind_of_start([], root))
    (page / "newer.css").unlink()
    assert len(set(kinds)) == 3
    assert kind_of_start([], root) == kinds[0]


@pytest.mark.parametrize(
    "name",
    [
        "serve.yaml",
        "docs/clusters.md",
        "tests/test_package.py",
        "deployments/__pycache__/app.cpython-311.pyc",
        "cpu_kernels/avx2.cpython-311-x86_64-linux-gnu.so",
        "cpu_kernels/avx2.abi3.so",
    ],
)
def test_settings_and_what_follows_from_the_code_leave_ray_as_it_is(root: Path, name: str) -> None:
    before = kind_of_start([], root)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("new")
    assert kind_of_start([], root) == before


def test_other_arguments_and_another_file_of_the_autoscaler_start_ray_anew(root: Path) -> None:
    config = root / "autoscaler.yaml"
    arguments = ["--head", f"--autoscaling-config={config}"]
    kinds = [kind_of_start(["--head"], root), kind_of_start(arguments, root)]
    for content in ("max_workers: 1", "max_workers: 2"):
        config.write_text(content)
        kinds.append(kind_of_start(arguments, root))
    assert len(set(kinds)) == 4
