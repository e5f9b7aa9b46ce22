"""Counts the metadata parts of a picture file, before Pillow reads the file.

For each segment, chunk or block Pillow runs a step in Python and allocates memory. It appends some parts to copies of
all earlier ones. A few megabytes of the smallest parts would keep it busy for minutes. This module unpacks nothing and
stops at the limit."""

from collections.abc import Iterator

from raylens.preprocess.schema import invalid_media

MAX_METADATA_PARTS = 1000  # a depth map or a colour profile is spread over dozens of parts
_MAX_PIXEL_CHUNKS = 20_000  # most PNGs are cut into chunks of 8 kB or more
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = frozenset({b"IDAT", b"fdAT", b"fcTL"})
_PNG_PROFILE = b"iCCP"
_GIF_EXTENSION = 0x21
_JPEG_SCAN = 0xDA
# For Pillow, no length follows these markers of a JPEG. It skips padding byte by byte.
_JPEG_BARE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_JPEG_PADDING = frozenset({0x00, 0xFF})


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
            raise invalid_media(
                f"the PNG has more than {MAX_METADATA_PARTS + _MAX_PIXEL_CHUNKS} chunks", "invalid_image"
            )
        if num_profiles > 1:
            # Each profile may unpack to a thousand times its size.
            raise invalid_media("the PNG has more than one colour profile (iCCP)", "invalid_image")
        position += 12 + int.from_bytes(content[position : position + 4])


def _check_jpeg(content: bytes) -> None:
    """Checks the segments before the first scan. The decoder, in C, reads the rest."""
    for num_parts, (marker, _) in enumerate(jpeg_segments(content), start=1):
        if marker != _JPEG_SCAN:
            _check_number(num_parts, "segments")


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields the marker of each segment of a JPEG and the position after the marker, up to the start of the first scan,
    by Pillow's rules. Other bytes count as padding. Raises IndexError if the file is cut off."""
    position, marker = 2, 0
    while marker != _JPEG_SCAN:
        marker = content[position + 1] if content[position] == 0xFF else 0
        yield marker, position + 2
        if marker in _JPEG_PADDING:
            position += 1
        elif marker in _JPEG_BARE:
            position += 2
        else:
            position += 2 + int.from_bytes(content[position + 2 : position + 4])


def _check_gif(content: bytes) -> None:
    """Checks the extensions before the first frame."""
    has_palette, palette = content[10] & 0x80, 3 << (content[10] & 7) + 1
    position, num_parts = 13 + (palette if has_palette else 0), 0
    while content[position] == _GIF_EXTENSION:
        num_parts += 1
        _check_number(num_parts, "extensions")
        position += 2
        while size := content[position]:
            position += 1 + size
        position += 1


def _check_number(num_parts: int, kind: str) -> None:
    if num_parts > MAX_METADATA_PARTS:
        raise invalid_media(f"the image has more than {MAX_METADATA_PARTS} {kind} beside its pixels", "invalid_image")
