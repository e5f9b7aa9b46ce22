"""Finds the segments of a JPEG file by Pillow's rules, without unpacking any."""

from collections.abc import Iterator

START_OF_SCAN = 0xDA
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of segments with the picture's size."""

_PADDING = frozenset({0x00, 0xFF})  # Pillow skips these byte by byte
# The markers that no length follows, for Pillow.
_BARE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields the marker of each segment and the position after the marker, up to the start of the first scan. Other
    bytes count as padding. Raises IndexError if the file is cut off."""
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
