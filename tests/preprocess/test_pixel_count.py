"""The work of an item, told by its header: as large as Pillow finds the picture, whatever the bytes, and at once."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raylens.preprocess.media import MediaLimits, VideoLimits
from raylens.preprocess.pixel_count import PIXELS_PER_BYTE, count_pixels, is_cut_off, work_pixels
from tests.pictures import encoded

STARTS = [
    *(
        b"",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xc0",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"GIF89a",
        b"BM",
        b"II*\0",
        b"MM\0*",
    ),
    *(b"RIFF\0\0\0\0WEBP" + kind for kind in (b"VP8 ", b"VP8L", b"VP8X")),
]
EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned by 90 degrees
EXIF[0x010E] = "x" * 50_000


@pytest.mark.parametrize(
    ("file_format", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "RGB", {"exif": EXIF, "icc_profile": bytes(200_000)}),
        ("MPO", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (30, 30))]}),
        ("PNG", "RGBA", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {"exif": EXIF}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw", "big_endian": True}),
    ],
)
def test_a_picture_has_as_many_pixels_as_pillow_finds(file_format: str, mode: str, options: dict[str, Any]) -> None:
    assert count_pixels(encoded(Image.new(mode, (301, 47)), file_format, **options)) == 301 * 47


def test_bitmaps_of_other_kinds() -> None:
    content = bytearray(encoded(Image.new("RGB", (30, 20)), "BMP"))
    content[22:26] = (-20).to_bytes(4, "little", signed=True)  # stored from the top down
    assert count_pixels(bytes(content)) == 600
    os2 = b"BM" + bytes(12) + (12).to_bytes(4, "little") + (7).to_bytes(2, "little") + (5).to_bytes(2, "little")
    assert count_pixels(os2) == 35


def test_jpeg_with_padding_and_bare_markers() -> None:
    content = encoded(Image.new("RGB", (30, 20)), "JPEG")
    assert count_pixels(content[:2] + b"\xff\xff\xff\xd0" + content[2:]) == 600


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"just some text", b"\0" * 1000),
        b"\xff\xd8\xff" + b"\0" * 50,
        encoded(Image.new("RGB", (30, 20)), "PNG")[:20],
        b"RIFF\0\0\0\0WEBPVP8X" + bytes(8),
        b"GIF89a" + bytes(4),
        b"II*\0" + b"\xff" * 50,
    ],
)
def test_what_cannot_be_read_counts_as_its_bytes(content: bytes) -> None:
    assert count_pixels(content) == len(content)


@given(st.sampled_from(STARTS), st.binary(max_size=64))
def test_no_bytes_raise(start: bytes, rest: bytes) -> None:
    assert count_pixels(start + rest) >= 0


def fastest(content: bytes) -> float:
    """Seconds of the fastest of some calls: what the machine does besides is not measured."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        count_pixels(content)
        times.append(time.perf_counter() - started)
    return min(times)


def test_headers_are_read_at_once_whatever_stands_before_them() -> None:
    jpeg = encoded(Image.new("RGB", (3840, 2160)), "JPEG", exif=EXIF)
    assert fastest(jpeg) < 1e-4
    assert fastest(jpeg[:2] + b"\xff\xe3\0\2" * 1_000_000 + jpeg[2:]) < 5e-3  # Pillow: 0.9 s
    assert fastest(jpeg[:2] + b"\xff" * 4_000_000 + jpeg[2:]) < 5e-3


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "BMP"])
def test_a_header_that_is_cut_off_is_told_from_one_of_no_picture(file_format: str) -> None:
    picture = encoded(Image.new("RGB", (30, 20)), file_format)
    assert is_cut_off(picture[:20])
    assert not is_cut_off(picture)
    assert not is_cut_off(b"")
    assert not is_cut_off(b"\0" * 1000)


def test_work_is_at_most_what_the_limits_let_through() -> None:
    limits = MediaLimits(max_image_pixels=1000, video=VideoLimits(max_total_pixels=2000))
    picture = encoded(Image.new("RGB", (30, 20)))
    assert work_pixels("image", picture, limits) == 600
    assert work_pixels("image", encoded(Image.new("RGB", (30, 40))), limits) == 1000
    assert work_pixels("image", bytes(5000), limits) == 1000
    assert work_pixels("video", bytes(10), limits) == work_pixels("audio", bytes(10), limits) == 10 * PIXELS_PER_BYTE
    # A GIF may be a video: its header tells of one frame.
    assert work_pixels("video", encoded(Image.new("P", (30, 20)), "GIF") + bytes(5000), limits) == 2000
