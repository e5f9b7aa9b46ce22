"""Pictures within the limit of pixels that would take time or memory without end."""

import io

import numpy as np
import pytest
from PIL import Image

from preprocess.media import MediaLimits, decode_image
from preprocess.schema import InvalidRequestError
from tests.pictures import encoded


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each scan refines all pixels once more, whatever few bytes ask for it."""
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    content = encoded(Image.fromarray(noise), "JPEG", progressive=True)
    assert decode_image(content, MediaLimits()).size == (256, 256)
    start = content.rindex(b"\xff\xda")
    last_scan, end = content[start:-2], content[-2:]
    with pytest.raises(InvalidRequestError, match="more than 100 scans"):
        decode_image(content[:start] + last_scan * 101 + end, MediaLimits())


def test_tiffs_are_no_pictures_here() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "TIFF")
    with pytest.raises(InvalidRequestError, match="not a readable image"):
        decode_image(buffer.getvalue(), MediaLimits())
