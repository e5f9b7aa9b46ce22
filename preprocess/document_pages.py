"""Pages of PDFs as pictures. A process of its own renders them: a hostile file can neither hang nor harm the server."""

import os
import subprocess
import sys
from collections.abc import Iterator

from raylens.preprocess import render_pages
from raylens.preprocess.schema import invalid_media

_COMMAND = (sys.executable, "-m", render_pages.__name__)
_TOO_MUCH = "the document takes too much time or memory to render"
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSAFEPATH")
"""Of the process: it gets no keys and tokens."""


def pages_of(content: bytes, max_pages: int) -> list[bytes]:
    """Returns each page as a PNG, or as a JPEG if that would be large. Raises InvalidRequestError for a document with
    more pages, or one that cannot be read or takes too much time or memory."""
    command = [*_COMMAND, str(max_pages)]
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    timeout_s = 2 * render_pages.MAX_SECONDS
    try:
        made = subprocess.run(
            command, input=content, capture_output=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise invalid_media(_TOO_MUCH, "invalid_document") from error
    if made.returncode == render_pages.TOO_MANY:
        reason = f"the document has {made.stderr.decode()} pages, the request has room for {max_pages} media items"
        raise invalid_media(reason, "too_many_items")
    if made.returncode < 0:  # killed for its time or memory
        raise invalid_media(_TOO_MUCH, "invalid_document")
    if made.returncode != 0:
        reason = f"the {len(content)} bytes are not a PDF that can be read and rendered, without a password"
        raise invalid_media(reason, "invalid_document")
    return [*_split(made.stdout)]


def _split(sent: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(sent):
        (length,) = render_pages.LENGTH.unpack_from(sent, at)
        at += render_pages.LENGTH.size + length
        yield sent[at - length : at]
