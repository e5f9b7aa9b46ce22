"""Pages of PDFs: rendered in a process of its own, which a hostile file cannot hold up."""

import io
import sys
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image, ImageDraw

from raylens.preprocess import document_pages, render_pages
from raylens.preprocess.document_pages import pages_of
from raylens.preprocess.schema import InvalidRequestError
from tests.documents import pdf_of, pdf_with_field


def page(colour: str, size: tuple[int, int] = (300, 400)) -> Image.Image:
    drawn = Image.new("RGB", size, "white")
    ImageDraw.Draw(drawn).rectangle((50, 50, 250, 200), fill=colour)
    return drawn


def test_each_page_is_a_picture_of_it() -> None:
    found = pages_of(pdf_of(page("red"), page("blue")), 16)
    assert len(found) == 2
    for content, colour in zip(found, ((255, 0, 0), (0, 0, 255)), strict=True):
        picture = Image.open(io.BytesIO(content))
        assert picture.format == "PNG"
        width, height = picture.size
        assert (width, height) == (625, 834)  # 150 dots an inch
        middle = np.asarray(picture)[height * 125 // 400, width // 2]
        np.testing.assert_allclose(middle, colour, atol=3)
    assert pages_of(pdf_of(page("red"), page("blue")), 16) == found


def test_a_large_page_has_fewer_dots() -> None:
    (found,) = pages_of(pdf_of(page("red", (9000, 4500))), 16)
    width, height = Image.open(io.BytesIO(found)).size
    assert 2**22 * 0.98 < width * height <= 2**22 * 1.02
    assert width == pytest.approx(2 * height, abs=2)


def test_a_large_picture_is_a_jpeg() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1000, 700, 3), dtype=np.uint8))
    (found,) = pages_of(pdf_of(noise), 1)
    assert Image.open(io.BytesIO(found)).format == "JPEG"


def test_a_field_of_a_form_is_seen() -> None:
    (found,) = pages_of(pdf_with_field("Ada Lovelace"), 1)
    dark = np.asarray(Image.open(io.BytesIO(found)).convert("L")) < 128
    assert dark.sum() > 100


@pytest.mark.parametrize("content", [b"", b"%PDF-1.7\nnot one", pdf_of(page("red"))[:1500], b"\x89PNG" * 100])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=rf"the {len(content)} bytes are not a PDF") as caught:
        pages_of(content, 16)
    assert caught.value.code == "invalid_document"


def test_there_are_no_more_pages_than_items() -> None:
    with pytest.raises(InvalidRequestError, match="has 3 pages, the request has room for 2 media items"):
        pages_of(pdf_of(*[page("red")] * 3), 2)


def test_a_document_that_takes_too_long_is_given_up() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    with (
        patch.object(document_pages, "_COMMAND", command),
        patch.object(render_pages, "MAX_SECONDS", 0.2),
        pytest.raises(InvalidRequestError, match="takes too much time or memory"),
    ):
        pages_of(b"", 16)


def test_its_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLENS_API_KEYS", "of-a-client")
    told = (
        "import os, sys; all = repr(os.environ).encode(); sys.stdout.buffer.write(len(all).to_bytes(8, 'little') + all)"
    )
    with patch.object(document_pages, "_COMMAND", (sys.executable, "-c", told)):
        (environment,) = pages_of(b"", 16)
    assert b"PATH" in environment
    assert b"of-a-client" not in environment
