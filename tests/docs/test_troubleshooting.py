"""docs/troubleshooting.md quotes messages of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TABLE = re.compile(r"^\| (Message|Code) .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
CELLS = [
    cell
    for first, rows in TABLE.findall(PAGE)
    for row in rows.splitlines()
    for cell in row.split("|")[1 : 2 if first == "Message" else 3]
]
"""With messages or codes."""
PACKAGES = ("deployments", "llm", "modeling", "preprocess")


def texts_in(source: str) -> Iterator[str]:
    """The strings of a module, with `{}` for what an f-string fills in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def texts() -> str:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return "\n".join(text for file in files for text in texts_in(file.read_text()))


def test_every_quoted_message_is_one_of_the_code_s(texts: str) -> None:
    quoted = [message for cell in CELLS for message in re.findall(r"`(.+?)`", cell)]
    parts = {part.strip(" ,()").removeprefix("overloaded_") for message in quoted for part in message.split("...")}
    assert len(quoted) > 80
    assert {part for part in parts if part not in texts} == set()
