"""docs/add-a-model.md names every place of a family, and the tables for people name every family."""

import re
import subprocess
from pathlib import Path

import pytest

from raylens.modeling.families import FAMILIES, FOUND, SERVED_FAMILIES, known_to

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
EXAMPLE = re.compile(r"deepseek[_-]?vl(?!_hybrid)", re.IGNORECASE)
"""The page's, as a `model_type`, a variable, a class and a name. The hybrid is another family."""

MAY_NAME_IT = {"docs/add-a-model.md", "docs/models.md", "tests/test_add_a_model.py"}


def listed() -> set[str]:
    """The files in the page's table."""
    return set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))


def naming_the_example() -> set[str]:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: ROOT / name for name in files if not name.startswith("benchmarks/results/")}
    return {
        name
        for name, path in texts.items()
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".json") and EXAMPLE.search(path.read_text())
    }


def test_the_page_lists_every_file_that_names_its_example_and_no_other() -> None:
    assert naming_the_example() - MAY_NAME_IT | {"CHANGELOG.md"} == listed()


def test_its_steps_name_what_the_table_of_families_says() -> None:
    family = FAMILIES["deepseek_vl"]
    assert family.llm == FOUND
    assert "`FOUND`" in PAGE
    for stage, place in (("preprocess", family.preprocess), ("encoder", family.encoder)):
        assert place is not None
        assert place in PAGE
        assert f"{stage}/models/{place.partition(':')[0]}.py" in listed()


@pytest.mark.parametrize("model_type", sorted(SERVED_FAMILIES))
def test_the_readme_names_every_family_that_is_served(model_type: str) -> None:
    assert f"`{model_type}`" in (ROOT / "README.md").read_text()


def test_the_readme_says_how_many_they_are() -> None:
    assert f"{len(SERVED_FAMILIES)} model families" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("model_type", known_to("preprocess"))
def test_preprocessing_tells_of_every_family(model_type: str) -> None:
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "preprocessing.md").read_text(), re.MULTILINE)
    assert model_type in {name.strip("` ") for row in rows for name in row.split(",")}
