"""PDFs for tests."""

import io

from PIL import Image


def pdf_of(*pages: Image.Image) -> bytes:
    """A PDF with a picture on each page, a point for each pixel."""
    content = io.BytesIO()
    first, *others = pages
    first.save(content, "PDF", save_all=True, append_images=others, resolution=72.0)
    return content.getvalue()
