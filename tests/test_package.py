"""What `pip install .` installs: a wheel with all that `raylens` needs, and no more."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import raylens
from raylens.cpu_kernels.library import BUILDS

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "raylens").iterdir() if path.is_symlink())
SOURCES = ("raylens", *PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE")


def build(tmp_path_factory: pytest.TempPathFactory, **environment: str) -> Path:
    """A wheel, built from a copy: setuptools leaves its folders beside the sources."""
    folder, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | environment, check=True, capture_output=True
    )
    (built,) = wheels.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its kernels are compiled without optimizations, which takes most of the time. `make demo` compiles them with."""
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    return build(tmp_path_factory, CXX=str(compiler), CC=str(compiler))


@pytest.fixture(scope="module")
def wheel_without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, CC="/no/compiler", CXX="/no/compiler")


def test_every_module_is_in_it_but_those_of_training_and_tests(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "raylens").glob("*.py")}
    of_packages = {f"raylens/{path.relative_to(ROOT)}" for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert files == own | {name for name in of_packages if not name.startswith("raylens/checkpoints/training/")}


def test_at_its_top_is_raylens_alone(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"raylens"}


def test_what_is_no_module_is_in_it(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("checkpoints/shapes", "checkpoints/pictures", "deployments/endpoint/page"):
        found = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert {f"raylens/{path.relative_to(ROOT)}" for path in found} <= files
    assert "raylens/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)


def run_unpacked(folder: Path, code: str) -> str:
    """Runs code away from the checkout, with the libraries of this environment, and returns what it prints."""
    libraries = [one for one in sys.path if one not in ("", str(ROOT))]
    path = f"import sys; sys.path[:] = {[str(folder), *libraries]!r}"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"{path}\n{code}"], cwd=folder, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_it_and_the_program_llm_start_in_one_environment(wheel: Path, tmp_path: Path) -> None:
    """Simon Willison's, of PyPI, whose package has the name of one of ours."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    start = "import runpy; sys.argv[1:] = ['--version']; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
    assert run_unpacked(tmp_path, start.format("raylens")) == f"raylens {raylens.__version__}\n"
    assert run_unpacked(tmp_path, start.format("llm")).endswith(f"llm, version {version('llm')}\n")


def libraries(wheel: Path) -> set[str]:
    return {name.split(".")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}


def test_the_kernels_are_in_it_where_there_is_a_compiler(wheel: Path, wheel_without_compiler: Path) -> None:
    assert libraries(wheel) == {f"raylens/cpu_kernels/{build}" for build in BUILDS}
    assert libraries(wheel_without_compiler) == set()


def test_without_kernels_it_says_why(wheel_without_compiler: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel_without_compiler).extractall(tmp_path)
    code = "from raylens.cpu_kernels.library import kernel_library, why_missing; print(kernel_library(), why_missing())"
    assert run_unpacked(tmp_path, code) == "None the package was installed without a C++ compiler\n"


def test_it_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """if True:
        import raylens.deployments.app, raylens.checkpoints as checkpoints
        from raylens.deployments.endpoint.page_route import CHAT_PAGE, OPERATOR_PAGE, page
        from raylens.deployments.launch.config_file import load_config
        page(CHAT_PAGE), page(OPERATOR_PAGE)
        print(load_config(None, {}).model, (checkpoints.PICTURES / "questions.json").is_file())
    """
    assert run_unpacked(tmp_path, code).split() == [str(tmp_path / "raylens" / "checkpoints" / "shapes"), "True"]
