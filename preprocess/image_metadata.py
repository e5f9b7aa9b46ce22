"""Counts the metadata parts of a picture file, before Pillow reads the file.

For each segment, chunk or block Pillow runs a step in Python and allocates memory. It appends some parts to copies of
all earlier ones. A few megabytes of the smallest parts would keep it busy for minutes. This module unpacks nothing and
stops at the limit.
"""

from raylens.preprocess.jpeg_segments import START_OF_SCAN, jpeg_segments
from raylens.preprocess.schema import InvalidRequestError

MAX_METADATA_PARTS = 1000  # a depth map or a colour profile is spread over dozens of parts
_MAX_PIXEL_CHUNKS = 20_000  # most PNGs are cut into chunks of 8 kB or more
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = frozenset({b"IDAT", b"fdAT", b"fcTL"})
_PNG_PROFILE = b"iCCP"
_GIF_EXTENSION = 0x21


def check_metadata(content: bytes) -> None:
    """Raises InvalidRequestError for a picture with more than MAX_METADATA_PARTS segments, chunks or extensions beside
    its pixels, and for a PNG with more than one colour profile or too many chunks in all. Other content passes, as does
    a picture cut off before a limit."""
    try:
        if content.startswith(_PNG_SIGNATURE):
            _check_png(content)
        elif content.startswith(b"\xff\xd8\xff"):
            _check_jpeg(content)
        elif content.startswith((b"GIF87a", b"GIF89a")):
            _check_gif(content)
    except IndexError:  # cut off
        return


def _check_png(content: bytes) -> None:
    """Checks all chunks, because Pillow also reads the ones after the pixels."""
    position, num_chunks, num_parts, num_profiles = len(_PNG_SIGNATURE), 0, 0, 0
    while position + 8 <= len(content):
        kind = content[position + 4 : position + 8]
        num_chunks += 1
        num_parts += kind not in _PNG_PIXELS
        num_profiles += kind == _PNG_PROFILE
        _check_number(num_parts, "chunks")
        if num_chunks > MAX_METADATA_PARTS + _MAX_PIXEL_CHUNKS:
            raise _invalid(f"the PNG has more than {MAX_METADATA_PARTS + _MAX_PIXEL_CHUNKS} chunks")
        if num_profiles > 1:
            # Each profile may unpack to a thousand times its size.
            raise _invalid("the PNG has more than one colour profile (iCCP)")
        position += 12 + int.from_bytes(content[position : position + 4])


def _check_jpeg(content: bytes) -> None:
    """Checks the segments before the first scan. The decoder, in C, reads the rest."""
    for num_parts, (marker, _) in enumerate(jpeg_segments(content), start=1):
        if marker != START_OF_SCAN:
            _check_number(num_parts, "segments")


def _check_gif(content: bytes) -> None:
    """Checks the extensions before the first frame."""
    flags = content[10]
    position, num_parts = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0), 0
    while content[position] == _GIF_EXTENSION:
        num_parts += 1
        _check_number(num_parts, "extensions")
        position += 2
        while size := content[position]:
            position += 1 + size
        position += 1


def _check_number(num_parts: int, kind: str) -> None:
    if num_parts > MAX_METADATA_PARTS:
        raise _invalid(f"the image has more than {MAX_METADATA_PARTS} {kind} beside its pixels")


def _invalid(reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, field="media", code="invalid_image")
