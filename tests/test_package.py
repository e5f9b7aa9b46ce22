"""What `pip install .` installs: a wheel with all that `raylens` needs, and no more."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (
    "checkpoints",
    "deployments",
    "encoder",
    "llm",
    "modeling",
    "pipelines",
    "preprocess",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its folders beside the sources."""
    folder, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (built,) = wheels.glob("*.whl")
    return built


def test_every_module_is_in_it_but_those_of_training_and_tests(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    packages = ("deployments", "encoder", "llm", "modeling", "pipelines", "preprocess")
    expected = {str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py")}
    assert files == expected | {"checkpoints/__init__.py"}


def test_what_is_no_module_is_in_it(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("checkpoints/shapes", "checkpoints/pictures"):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / folder).iterdir()} <= files
    assert "deployments/endpoint/page/index.html" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_it_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout, with the libraries of this environment."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """if True:
        import deployments.app, checkpoints
        from deployments.endpoint.page_route import Page
        from deployments.config_file import load_config
        Page()
        print(load_config(None, {}).model, (checkpoints.PICTURES / "questions.json").is_file())
    """
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = [{str(tmp_path)!r}, *{sys.path[1:]!r}]\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [str(tmp_path / "checkpoints" / "shapes"), "True"]
