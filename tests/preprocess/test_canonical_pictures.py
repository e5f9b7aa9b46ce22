"""What the model sees is what people see: turned as the file says, nothing of what is transparent, the first frame."""

import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps

from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.schema import InvalidRequestError
from tests.pictures import encoded

LIMITS = MediaLimits()
GREY, COLOUR, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 4, 6
WHITE = (255, 255, 255)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(depth: int, kind: int, left: int, right: int, transparent: bytes = b"") -> bytes:
    """8 x 8 pixels, the left and the right half of one colour each, as whole numbers of `depth` bits per channel."""
    bits = depth * {GREY: 1, COLOUR: 3, GREY_ALPHA: 2, COLOUR_ALPHA: 4}[kind]
    row = 0
    for pixel in [left] * 4 + [right] * 4:
        row = row << bits | pixel
    rows = (b"\0" + row.to_bytes(bits, "big")) * 8
    header = chunk(b"IHDR", struct.pack(">2I5B", 8, 8, depth, kind, 0, 0, 0))
    hidden = chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + hidden + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def halves(content: bytes) -> list[Any]:
    image = decode_image(content, LIMITS)
    return [image.getpixel((1, 1)), image.getpixel((6, 6))]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (png(1, GREY, 0, 1, b"\0\0"), [WHITE, WHITE]),
        (png(2, GREY, 1, 2, b"\0\1"), [WHITE, (170,) * 3]),
        (png(2, GREY, 1, 2, b"\0\5"), [WHITE, (170,) * 3]),  # only the lower bits count
        (png(4, GREY, 5, 10, b"\0\5"), [WHITE, (170,) * 3]),
        (png(8, GREY, 10, 200, b"\0\x0a"), [WHITE, (200,) * 3]),
        (png(8, COLOUR, 0x0A141E, 0xC80000, b"\0\x0a\0\x14\0\x1e"), [WHITE, (200, 0, 0)]),
        (png(8, GREY_ALPHA, 0x0A00, 0x0AFF), [WHITE, (10,) * 3]),
        (png(8, COLOUR_ALPHA, 0x0A141E00, 0x0A141EFF), [WHITE, (10, 20, 30)]),
        (png(16, GREY_ALPHA, 0x80000000, 0x8000FFFF), [WHITE, (128,) * 3]),
        (png(16, COLOUR_ALPHA, 0x8000000000000000, 0x800000000000FFFF), [WHITE, (128, 0, 0)]),
    ],
)
def test_what_is_transparent_is_white(content: bytes, expected: list[Any]) -> None:
    assert halves(content) == expected


@pytest.mark.parametrize(
    "content",
    [
        png(16, GREY, 0x1234, 0x8000, b"\x12\x34"),
        png(16, COLOUR, 0x123456789ABC, 0x800000000000, b"\x12\x34\x56\x78\x9a\xbc"),
    ],
)
def test_a_transparent_colour_that_cannot_be_told_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="16 bits with a transparent colour"):
        decode_image(content, LIMITS)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("file_format", "options"), [("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True})]
)
def test_every_orientation_is_applied(orientation: int, file_format: str, options: dict[str, Any]) -> None:
    image = Image.new("RGB", (48, 32), "white")
    image.paste("black", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_image(encoded(image, file_format, exif=exif, **options), LIMITS)
    image.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(image)
    assert decoded.size == upright.size == ((32, 48) if orientation > 4 else (48, 32))
    for corner in ((4, 4), (4, upright.height - 4), (upright.width - 4, 4), (upright.width - 4, upright.height - 4)):
        shade = decoded.convert("L").getpixel(corner)
        assert isinstance(shade, int)
        assert abs(shade - upright.convert("L").getpixel(corner)) < 8


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "MPO"])
def test_only_the_first_frame_is_seen(file_format: str) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue", "lime")]
    content = encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(content)) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    red, green, blue = halves(content)[0]
    assert (red > 200, green < 50, blue < 50) == (True, True, True)
