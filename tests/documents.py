"""PDFs for tests."""

import io

from PIL import Image


def pdf_of(*pages: Image.Image) -> bytes:
    """A PDF with a picture on each page, a point for each pixel."""
    content = io.BytesIO()
    first, *others = pages
    first.save(content, "PDF", save_all=True, append_images=others, resolution=72.0)
    return content.getvalue()


def pdf_with_field(value: str) -> bytes:
    """A PDF with one empty page and a text field of a form on it that has this value."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [4 0 R] /DR << /Font << /F1 5 0 R >> >> >> >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Annots [4 0 R] >>",
        b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /F 4 /Rect [20 100 280 140] /DA (/F1 24 Tf 0 g)"
        b" /V (" + value.encode() + b") >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    content, offsets = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, start=1):
        offsets.append(len(content))
        content += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(content))
    return content + head + table + end
