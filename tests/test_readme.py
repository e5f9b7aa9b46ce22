"""The README tells the truth about the files and the commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("deployments", "preprocess", "encoder", "llm", "modeling", "checkpoints", "benchmarks", "dashboards")


def test_the_tree_names_every_file() -> None:
    tree = README[README.index("deployments/      ") :]
    for package in PACKAGES:
        section = re.search(rf"^{package}/.*?(?=^\S|\Z)", tree, re.MULTILINE | re.DOTALL)
        assert section is not None, package
        named = set(re.findall(r"(\w+\.py)", section.group()))
        files = {path.name for path in (ROOT / package).rglob("*.py")} - {"__init__.py"}
        assert named == files, package


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)\b", README)) - {"it"} <= targets


def test_every_path_named_in_the_architecture_exists() -> None:
    paths = re.findall(
        r"`((?:deployments|preprocess|encoder|llm|modeling|tests|checkpoints)/[\w/]+\.py)`", ARCHITECTURE
    )
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
