"""The README tells the truth about the files and the commands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = (
    "benchmarks",
    "checkpoints",
    "cpu_kernels",
    "dashboards",
    "deployments",
    "encoder",
    "llm",
    "modeling",
    "planning",
    "preprocess",
)
FILES_ONLY = ("clusters", "kubernetes")
"""Folders without modules."""


def test_the_tree_names_every_package() -> None:
    tree = README[README.index("deployments/      ") : README.rindex("```")]
    assert {line.split()[0].rstrip("/") for line in tree.splitlines() if "/ " in line and line[0] != " "} == {
        *PACKAGES,
        *FILES_ONLY,
        "tests",
    }
    rooms = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    assert rooms == {path.parent.name for path in (ROOT / "deployments").glob("*/__init__.py")}


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_every_module_says_what_it_is_for(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if path.read_text().strip()]
    assert [str(path) for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)\b", README)) - {"it"} <= targets


def test_every_path_named_in_the_architecture_exists() -> None:
    paths = re.findall(
        r"`((?:deployments|preprocess|encoder|llm|modeling|tests|checkpoints)/[\w/]+\.py)`", ARCHITECTURE
    )
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
