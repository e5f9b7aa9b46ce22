"""mkdocs' hooks: the navigation is docs/README.md's, and links that leave docs/ lead into the repository."""

import re
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

_READER = re.compile(r"^\| (\w+) \| (.+) \|$", re.MULTILINE)
_PAGE = re.compile(r"\]\(([\w-]+\.md)\)")
_DECISIONS = re.compile(r"^### (.+)\n\n((?:- .+\n)+)", re.MULTILINE)
_DECISION = re.compile(r"^- \[.+\]\((.+)\):", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")
_BOOSTS = {"decisions": 0.001, "troubleshooting.md": 50}
"""In the search. Decisions have sentences as titles, which would be found first. Messages are in long tables."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    index = (Path(config.docs_dir) / "README.md").read_text(encoding="utf-8")
    readers = [{reader: _PAGE.findall(cell)} for reader, cell in _READER.findall(index) if _PAGE.search(cell)]
    decisions = [{subject: _DECISION.findall(records)} for subject, records in _DECISIONS.findall(index)]
    config.nav = ["README.md", *readers, {"Decisions": decisions}]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    repository = config.extra["repository"]
    page.meta["search"] = {"boost": _BOOSTS.get(page.file.src_uri.split("/")[0], 1)}
    folder = join("docs", page.file.src_uri, "..")

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = normpath(join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        return f"[{text}]({repository}/blob/HEAD/{path})" if repository else text

    return _LINK.sub(link, markdown)
