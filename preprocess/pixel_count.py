"""Estimates an item's work in pixels from its first bytes, for scheduling before anything is decoded.

Pillow reads a picture's size, too, but parses everything before the pixels: 5 MB of empty JPEG segments keep it busy
for a second. Here every loop is bounded and nothing is unpacked, so that it may run on an event loop."""

import math
import struct
from itertools import islice

from raylens.preprocess.image_metadata import MAX_METADATA_PARTS, jpeg_segments
from raylens.preprocess.media import MediaLimits

PIXELS_PER_BYTE = 16
"""The work of one byte of video or sound, in pixels. This is an estimate, because only parsing the container would show
the number of frames. H.264 has some 100 pixels a byte. All of them are decoded, at a fraction of a JPEG's cost, and
some are converted to RGB. A byte of MP3 takes as long as 16 pixels of a JPEG, one of WAV as 2, one of Opus as 40."""

_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of segments with the picture's size
_CUT_OFF = (struct.error, IndexError)
_MAX_TIFF_ENTRIES = 64  # entries are sorted, with width and height among the first


def work_pixels(modality: str, content: bytes, limits: MediaLimits) -> int:
    """Returns an item's work in pixels, capped by `limits`, because a larger item is rejected without work.

    For a picture this is width x height, for others an estimate from the number of bytes. Never raises."""
    if modality != "image":
        return min(len(content) * PIXELS_PER_BYTE, limits.video.max_total_pixels)
    return min(count_pixels(content), limits.max_image_pixels)


def count_pixels(content: bytes) -> int:
    """Returns width x height of an encoded picture by its header, or its number of bytes if the header cannot be read.

    For an unknown format, the number of bytes is right within a factor of about 10. Never raises."""
    return header_pixels(content) or len(content)


def header_pixels(content: bytes) -> int | None:
    """Returns width x height of a picture by its header, or None if the header is cut off or unknown. Never raises."""
    try:
        return _header_pixels(content) or None
    except _CUT_OFF:
        return None


def is_cut_off(content: bytes) -> bool:
    """Returns whether the content starts like a picture of a known format but ends before its size. Never raises."""
    try:
        _header_pixels(content)
    except _CUT_OFF:
        return True
    return False


def _header_pixels(content: bytes) -> int:
    """Returns width x height, or 0 for no picture. Raises struct.error or IndexError if the header is cut off."""
    if content.startswith(_PNG_START):
        return math.prod(struct.unpack_from(">II", content, 16))
    if content.startswith(b"\xff\xd8\xff"):
        return _jpeg_pixels(content)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _webp_pixels(content)
    if content.startswith((b"GIF87a", b"GIF89a")):
        return math.prod(struct.unpack_from("<HH", content, 6))
    if content.startswith(b"BM"):
        is_os2 = struct.unpack_from("<I", content, 14) == (12,)
        # A BMP stored from top to bottom has a negative height.
        return int(abs(math.prod(struct.unpack_from("<HH" if is_os2 else "<ii", content, 18))))
    if content.startswith((b"II*\0", b"MM\0*")):
        return _tiff_pixels(content, "<" if content.startswith(b"II") else ">")
    return 0


def _jpeg_pixels(content: bytes) -> int:
    for marker, position in islice(jpeg_segments(content), MAX_METADATA_PARTS):
        if marker in _JPEG_FRAMES:
            return math.prod(struct.unpack_from(">HH", content, position + 3))
    return 0


def _webp_pixels(content: bytes) -> int:
    kind = content[12:16]
    if kind == b"VP8 ":
        # The upper two bits of each side are a scale.
        return math.prod(side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X" and len(content) >= 30:
        return (int.from_bytes(content[24:27], "little") + 1) * (int.from_bytes(content[27:30], "little") + 1)
    return 0


def _tiff_pixels(content: bytes, order: str) -> int:
    (start,) = struct.unpack_from(f"{order}I", content, 4)
    (num_entries,) = struct.unpack_from(f"{order}H", content, start)
    size = {256: 0, 257: 0}  # width, height
    for index in range(min(num_entries, _MAX_TIFF_ENTRIES)):
        entry = start + 2 + 12 * index
        tag, kind = struct.unpack_from(f"{order}HH", content, entry)
        if tag in size:
            (size[tag],) = struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", content, entry + 8)
    return size[256] * size[257]
