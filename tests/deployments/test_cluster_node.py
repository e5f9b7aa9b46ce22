"""`raylens node`: what starts Ray anew on a node, and what does not."""

from pathlib import Path

import pytest

from raylens.deployments.launch.node import kind_of_start

FILES = (
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
    "cpu_kernels/csrc/activation.h",
    "cpu_kernels/library.py",
    "deployments/app.py",
    "deployments/endpoint/page/shared.js",
    "deployments/endpoint/page/operator.html",
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
