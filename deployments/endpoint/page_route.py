"""The web page at `/`, its files at `/page/`, its example pictures at `/examples`, and the operator's page at
`/dashboard`.

The pages' headers forbid the browser to run or load anything from elsewhere."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
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
_PACKED_TYPES = frozenset({".woff2"})
_ROUTE: dict[str, Any] = {"methods": ["GET", "HEAD"], "include_in_schema": False}


class Document:
    """Content that the browser may keep, and asks for again by its tag. `packs`: whether compression makes it
    smaller."""

    def __init__(self, content: bytes, media_type: str, headers: dict[str, str], *, packs: bool = True) -> None:
        self._content = content
        self._packed = gzip.compress(content, mtime=0) if packs else None
        self._media_type = media_type
        self._etag = f'W/"{hashlib.sha256(content).hexdigest()}"'
        self._headers = headers | {
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": self._etag,
            "Vary": "Accept-Encoding",
        }

    def add_to(self, api: FastAPI, path: str) -> None:
        api.add_api_route(path, self.respond, **_ROUTE)

    async def respond(
        self, if_none_match: Annotated[str | None, Header()] = None, accept_encoding: Annotated[str, Header()] = ""
    ) -> Response:
        """Returns the content, or 304 if the browser has it."""
        known = {tag.strip() for tag in (if_none_match or "").split(",")}
        if known & {self._etag, "*"}:
            return Response(status_code=304, headers=self._headers)
        if self._packed is None or "gzip" not in accept_encoding:
            return Response(self._content, media_type=self._media_type, headers=self._headers)
        headers = self._headers | {"Content-Encoding": "gzip"}
        return Response(self._packed, media_type=self._media_type, headers=headers)


def page(file: Path) -> Document:
    return Document(file.read_bytes(), "text/html", {"Content-Security-Policy": _POLICY})


class PageFiles:
    """The scripts, styles and fonts of both pages."""

    def __init__(self, folder: Path = PAGE) -> None:
        files = [file for file in folder.rglob("*") if file.suffix in _TYPES]
        self._documents = {file.relative_to(folder).as_posix(): _document(file) for file in files}

    def add_to(self, api: FastAPI) -> None:
        api.add_api_route(f"{PREFIX}{{path:path}}", self._respond, **_ROUTE)

    async def _respond(
        self,
        path: str,
        if_none_match: Annotated[str | None, Header()] = None,
        accept_encoding: Annotated[str, Header()] = "",
    ) -> Response:
        document = self._documents.get(path)
        if document is None:
            raise HTTPException(404, f"the page has no file {path[:100]!r}")
        return await document.respond(if_none_match, accept_encoding)


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


def _document(file: Path) -> Document:
    return Document(file.read_bytes(), _TYPES[file.suffix], {}, packs=file.suffix not in _PACKED_TYPES)
