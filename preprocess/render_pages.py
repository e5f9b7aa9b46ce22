"""A process that renders a PDF from its standard input, see `document_pages`. It imports nothing else of Raylens."""

import io
import resource
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pypdfium2

MAX_SECONDS = 30
"""Processor time."""
TOO_MANY, UNREADABLE = 3, 4
"""Exit statuses. With the first, standard error has the number of pages."""
LENGTH = struct.Struct("<Q")
"""Of a page in bytes, in front of it."""
_MAX_BYTES = 2**31
_MAX_PNG_BYTES = 2**20
_DPI, _POINTS_PER_INCH = 150, 72
_MAX_PAGE_PIXELS = 2**22
"""A page of A4 has half of this; larger pages get fewer dots per inch."""


def render(max_pages: int) -> int:
    """Writes each page to standard output, as a picture behind its length. Returns the exit status."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(sys.stdin.buffer.read())
    except pypdfium2.PdfiumError:
        return UNREADABLE
    document.init_forms()  # else fields of forms are empty
    if len(document) > max_pages:
        sys.stderr.write(str(len(document)))
        return TOO_MANY
    for page in document:
        picture = _picture(page)
        sys.stdout.buffer.write(LENGTH.pack(len(picture)) + picture)
    return 0


def _picture(page: "pypdfium2.PdfPage") -> bytes:
    width, height = page.get_size()
    most = (_MAX_PAGE_PIXELS / max(width * height, 1e-6)) ** 0.5
    image = page.render(scale=min(_DPI / _POINTS_PER_INCH, most)).to_pil().convert("RGB")
    encoded = io.BytesIO()
    image.save(encoded, "PNG", compress_level=1)
    if encoded.tell() > _MAX_PNG_BYTES:  # a scan or a photo
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=95)
    return encoded.getvalue()


if __name__ == "__main__":
    sys.exit(render(int(sys.argv[1])))
