"""Finds the segments of a JPEG file, by Pillow's rules for what a segment is, without unpacking any."""

from collections.abc import Iterator

START_OF_SCAN = 0xDA
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of the segments that hold the picture's size."""

_PADDING = frozenset({0x00, 0xFF})  # Pillow skips these byte by byte
# The markers behind which Pillow expects no length.
_BARE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields the marker of each segment and the position behind the marker. The start of the first scan is the last
    segment. Other bytes count as padding. Raises IndexError where the file is cut off."""
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
