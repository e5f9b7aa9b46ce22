"""The documentation tells the truth about the files and the commands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("[!.]*/__init__.py") if path.parent.name != "raylens")


def test_the_architecture_names_every_package_and_every_room() -> None:
    folders = {name for row in re.findall(r"^\| (`.*?`) \|", ARCHITECTURE, re.MULTILINE) for name in named(row)}
    assert {*PACKAGES, *(path.parent.name for path in (ROOT / "deployments").glob("*/__init__.py"))} <= folders


def named(row: str) -> list[str]:
    return re.findall(r"`(\w+)/`", row)


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_every_module_says_what_it_is_for(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if path.read_text().strip()]
    assert [str(path) for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE)) <= targets
    tops = "|".join([*PACKAGES, "tests"])
    paths = re.findall(rf"`((?:{tops})/[\w./-]+\.\w+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = re.findall(r"python -m ((?:benchmarks|dashboards|tests)(?:\.\w+)+)", text)
    assert [name for name in modules if not is_run_by(ROOT / name.replace(".", "/"))] == []


def is_run_by(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_file_and_a_section(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    targets = [link.partition("#") for link in links if "://" not in link]
    assert [name + mark + section for name, mark, section in targets if not leads_somewhere(page, name, section)] == []


def leads_somewhere(page: Path, name: str, section: str) -> bool:
    target = page.parent / name if name else page
    return target.exists() and (not section or section in anchors(target.read_text()))


def anchors(text: str) -> set[str]:
    """GitHub's, of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_index_has_a_line_for_every_decision() -> None:
    listed = re.findall(r"^- \[.+\]\(decisions/(.+)\): .+", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(record.name for record in (ROOT / "docs" / "decisions").iterdir())
