"""The web page at `/`, its files at `/page/`, its example pictures at `/examples`, and the operator's page at
`/dashboard`.

The pages' headers forbid the browser to run or load anything from elsewhere."""

import gzip
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from raylens.checkpoints import PICTURES
from raylens.preprocess.data_url import data_url

PAGE = Path(__file__).parent / "page"
CHAT_PAGE, OPERATOR_PAGE = PAGE / "chat" / "index.html", PAGE / "operator" / "operator.html"
PREFIX = "/page/"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src data: blob:;"
    " media-src data: blob:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts, styles and fonts are files of the page. Text never becomes markup (Trusted Types)."""
_TYPES = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
_ROUTE: dict[str, Any] = {"methods": ["GET", "HEAD"], "include_in_schema": False}


class Document:
    """Content that the browser may keep, and asks for again by its tag."""

    def __init__(self, content: bytes, media_type: str, headers: dict[str, str]) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'W/"{hashlib.sha256(content).hexdigest()}"'
        self._headers = headers | {
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": self._etag,
            "Vary": "Accept-Encoding",
        }

    @cached_property
    def _packed(self) -> bytes:
        """Made when a browser first asks: all of them take 60 ms, which the start of an ingress need not wait for."""
        return gzip.compress(self._content, mtime=0)

    def add_to(self, api: FastAPI, path: str) -> None:
        api.add_api_route(path, self.respond, **_ROUTE)

    async def respond(self, request: Request) -> Response:
        """Returns the content, or 304 if the browser has it."""
        known = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
        if known & {self._etag, "*"}:
            return Response(status_code=304, headers=self._headers)
        accepts = "gzip" in request.headers.get("accept-encoding", "")
        if not accepts or len(self._packed) >= len(self._content):  # fonts are packed already
            return Response(self._content, media_type=self._media_type, headers=self._headers)
        headers = self._headers | {"Content-Encoding": "gzip"}
        return Response(self._packed, media_type=self._media_type, headers=headers)


def page(file: Path) -> Document:
    return Document(file.read_bytes(), "text/html", {"Content-Security-Policy": _POLICY})


class PageFiles:
    """The scripts, styles and fonts of both pages."""

    def __init__(self, folder: Path = PAGE) -> None:
        files = [file for file in folder.rglob("*") if file.suffix in _TYPES]
        self._documents = {
            file.relative_to(folder).as_posix(): Document(file.read_bytes(), _TYPES[file.suffix], {}) for file in files
        }

    def add_to(self, api: FastAPI) -> None:
        api.add_api_route(f"{PREFIX}{{path:path}}", self._respond, **_ROUTE)

    async def _respond(self, path: str, request: Request) -> Response:
        document = self._documents.get(path)
        if document is None:
            raise HTTPException(404, f"the page has no file {path[:100]!r}")
        return await document.respond(request)


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
