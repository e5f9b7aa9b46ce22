"""Walks through the segments of a JPEG file, by Pillow's rules for what a segment is, without unpacking any."""

from collections.abc import Iterator

START_OF_SCAN = 0xDA
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the segments that hold the size."""

_PADDING = frozenset({0x00, 0xFF})  # byte by byte, as Pillow takes it
# Markers that Pillow takes to be without a length.
_BARE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """The marker of each segment and the position of what follows it, up to the start of the first scan, which is the
    last; what is no marker counts as one of padding. Raises IndexError where the file is cut off."""
    position, marker = 2, 0
    while marker != START_OF_SCAN:
        marker = content[position + 1] if content[position] == 0xFF else 0
        yield marker, position + 2
        if marker in _PADDING:
            position += 1
        elif marker in _BARE:
            position += 2
        else:
            position += 2 + int.from_bytes(content[position + 2 : position + 4])
