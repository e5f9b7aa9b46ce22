"""The web page at `/`, its example pictures at `/examples`, and the operator's page at `/dashboard`.

Each page is one file. Its headers forbid the browser to run or load anything else."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, params
from fastapi.responses import Response

from raylens.checkpoints import PICTURES
from raylens.preprocess.data_url import data_url

_FOLDER = Path(__file__).parent / "page"
CHAT_PAGE, OPERATOR_PAGE = _FOLDER / "index.html", _FOLDER / "operator.html"
_SHARED = {"/* shared.css */\n": "shared.css", "// shared.js\n": "shared.js"}
"""Marks in pages, and the files that replace them."""


class Document:
    def __init__(self, content: bytes, media_type: str, headers: dict[str, str]) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._headers = headers | {
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": self._etag,
        }

    def add_to(self, api: FastAPI, path: str, dependencies: Sequence[params.Depends] = ()) -> None:
        methods = ["GET", "HEAD"]
        api.add_api_route(path, self._respond, methods=methods, dependencies=dependencies, include_in_schema=False)

    async def _respond(self, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        """Returns the content, or 304 if the browser has it."""
        known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if known & {self._etag, "*"}:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._media_type, headers=self._headers)


def page(file: Path) -> Document:
    """Reads a page with its shared files. Raises ValueError unless it has exactly one script and one style sheet."""
    content = file.read_text()
    for mark, name in _SHARED.items():
        content = content.replace(mark, (_FOLDER / name).read_text(), 1)
    return Document(content.encode(), "text/html", {"Content-Security-Policy": _security_policy(content)})


def examples() -> Document:
    return Document(json.dumps(read_examples(PICTURES)).encode(), "application/json", {})


def read_examples(folder: Path) -> list[dict[str, Any]]:
    """Returns the first question about each set of pictures in the folder's questions.json, with the pictures as
    `data:` URLs. Leaves out a question if one of its pictures is missing."""
    file = folder / "questions.json"
    if not file.is_file():
        return []
    examples: dict[frozenset[str], dict[str, Any]] = {}
    for entry in json.loads(file.read_text()):
        pictures = [folder / name for name in entry["pictures"]]
        if all(picture.is_file() for picture in pictures):
            example = {"question": entry["question"], "pictures": [data_url(file.read_bytes()) for file in pictures]}
            examples.setdefault(frozenset(entry["pictures"]), example)
    return list(examples.values())


def _security_policy(page: str) -> str:
    """Returns the policy of the page. It allows the script and the style sheet in `page`, by their hashes, and
    connections to the page's own origin. Text never becomes markup (Trusted Types)."""
    return (
        f"default-src 'none'; script-src '{_hash(page, 'script')}'; style-src '{_hash(page, 'style')}';"
        " img-src data: blob:; media-src data: blob:; connect-src 'self'; form-action 'none'; frame-ancestors 'none';"
        " base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(page: str, tag: str) -> str:
    """Returns the hash source of the page's only `<tag>`."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    if len(contents) != 1:
        raise ValueError(f"the page has {len(contents)} <{tag}> elements, not one")
    return "sha256-" + base64.b64encode(hashlib.sha256(contents[0].encode()).digest()).decode()
