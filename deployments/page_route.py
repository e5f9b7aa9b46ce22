"""The web page at `/`: one file, and headers by which a browser runs and loads nothing but what is in it."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Annotated

from fastapi import Header
from fastapi.responses import Response

_FILE = Path(__file__).parent / "page" / "index.html"


class Page:
    """The page as read at the start. Raises ValueError when it has not exactly one script and one style sheet."""

    def __init__(self, file: Path = _FILE) -> None:
        self._content = file.read_bytes()
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()}"'
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._content.decode()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": self._etag,
        }

    async def respond(self, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        """The page, or 304 where the browser has it already."""
        known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if known & {self._etag, "*"}:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type="text/html", headers=self._headers)


def content_security_policy(page: str) -> str:
    """Only the script and the style sheet that are in `page` itself, known by their hashes; no address but the page's
    own origin; and no text becomes markup (Trusted Types)."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(page, 'script')}'",
            f"style-src '{_hash(page, 'style')}'",
            "img-src data: blob:",
            "connect-src 'self'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(page: str, tag: str) -> str:
    """The source expression for the content of the one `<tag>` of the page."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    if len(contents) != 1:
        raise ValueError(f"the page has {len(contents)} <{tag}> elements, not one")
    return "sha256-" + base64.b64encode(hashlib.sha256(contents[0].encode()).digest()).decode()
