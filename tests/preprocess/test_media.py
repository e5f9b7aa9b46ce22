"""Encoded media to RGB pictures: what is accepted, what is refused, and how each refusal names the field."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.schema import InvalidRequestError
from tests.pictures import disc, encoded

LIMITS = MediaLimits(max_item_bytes=10_000, max_image_pixels=40_000)


def refused(call: Callable[[], object]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert caught.value.field == "media"
    return caught.value


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_decode_to_rgb(file_format: str) -> None:
    image = decode_image(encoded(disc("red"), file_format), limits=MediaLimits())
    assert (image.mode, image.size) == ("RGB", (128, 128))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"just some text", "invalid_image"),
        (encoded(disc("red"))[:200], "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image"),
        (encoded(Image.new("RGB", (1, 1))), "image_too_small"),
        (encoded(Image.new("RGB", (3, 100))), "image_too_small"),
        (encoded(Image.new("RGB", (201, 200))), "image_too_large"),
        (encoded(Image.new("1", (4, 404))), "image_too_large"),
        (encoded(Image.new("1", (20_000, 20_000))), "image_too_large"),
    ],
)
def test_bad_images_are_refused(content: bytes, code: str) -> None:
    assert refused(lambda: decode_image(content, limits=LIMITS)).code == code


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (40, 20), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = decode_image(encoded(image, "JPEG", exif=exif), limits=LIMITS)
    assert turned.size == (20, 40)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    image = Image.new("RGBA", (20, 20), (255, 0, 0, 0)).convert(mode)
    options: dict[str, Any] = {"transparency": 0} if mode == "P" else {}
    decoded = decode_image(encoded(image, **options), limits=LIMITS)
    assert decoded.getpixel((10, 10)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_shades() -> None:
    image = Image.fromarray(np.array([[0, 16_384], [32_768, 65_535]] * 4, dtype=np.uint16).repeat(4, axis=1))
    decoded = decode_image(encoded(image), limits=LIMITS)
    assert [decoded.getpixel((x, y)) for x, y in ((0, 0), (4, 0), (0, 1), (4, 1))] == [
        (shade,) * 3 for shade in (0, 63, 127, 255)
    ]


def test_only_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(content, limits=LIMITS).getpixel((5, 5)) == (255, 0, 0)
