"""`data:` URLs to the bytes in them, whatever pieces they come in."""

import asyncio
import base64
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.preprocess.data_url import DataUrl, data_url, is_data_url
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import InvalidRequestError

LIMITS = MediaLimits(max_item_bytes=10_000)
HEADER = "data:image/png;base64,"


def decoded(*pieces: str | bytes, limits: MediaLimits = LIMITS) -> bytes:
    texts = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return asyncio.run(DataUrl(texts).decode(limits))


def test_it_names_its_type_and_holds_base64() -> None:
    assert data_url(b"\xfb\xff", "video/mp4") == "data:video/mp4;base64,+/8="


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 400), max_size=4))
def test_any_cut_gives_the_same_bytes(content: bytes, cuts: list[int]) -> None:
    url = data_url(content).encode()
    # The header comes in one piece: what is taken apart begins behind it.
    places = sorted(len(HEADER) + cut for cut in cuts)
    pieces = [url[start:end] for start, end in zip([0, *places], [*places, len(url)], strict=True)]
    assert decoded(*pieces) == content


@pytest.mark.parametrize("num_bytes", [100, 5_120_000])
def test_a_long_one_is_decoded_whole(num_bytes: int) -> None:
    content = bytes(range(100)) * (num_bytes // 100)
    text = data_url(content).encode()
    pieces = [text[at : at + 32768] for at in range(0, len(text), 32768)]
    assert decoded(*pieces, limits=MediaLimits()) == content
    assert DataUrl(pieces).head(1000)[:1000] == content[:1000]
    assert DataUrl(pieces).num_bytes == pytest.approx(num_bytes, abs=20)


def test_what_the_program_base64_prints_is_read() -> None:
    content = bytes(range(256)) * 4
    printed = subprocess.run(["base64"], input=content, capture_output=True, check=True).stdout
    assert printed.count(b"\n") > 10
    assert decoded(HEADER, printed) == content
    assert decoded(HEADER, printed.replace(b"\n", b"\r\n")) == content


def test_capitals_and_escapes_are_read_as_browsers_read_them() -> None:
    assert decoded("DATA:image/png;BASE64,QUJD") == b"ABC"
    assert is_data_url("DaTa:,")
    assert not is_data_url("https://data:")
    assert decoded("data:;base64,%2B%2f", "%2B", "%2F") == base64.b64decode("+/+/")


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 400), max_size=4), st.booleans(), st.booleans())
def test_padding_may_be_absent_and_the_alphabet_that_of_urls(
    content: bytes, cuts: list[int], is_padded: bool, is_for_urls: bool
) -> None:
    text = (base64.urlsafe_b64encode if is_for_urls else base64.b64encode)(content)
    text = text if is_padded else text.rstrip(b"=")
    places = sorted(cuts)
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert decoded(HEADER, *pieces) == content
    assert DataUrl([HEADER.encode(), *pieces]).head(1000) == content


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (HEADER + "!!!", "invalid_base64"),
        (HEADER + "abcde", "invalid_base64"),
        (HEADER + "ab=", "invalid_base64"),
        (HEADER, "empty_media"),
        (HEADER + "QUI=" * 100, "invalid_base64"),
        (HEADER + "Ã¤" * 4, "invalid_base64"),
        ("data:image/png,abc", "invalid_data_url"),
        ("data:", "invalid_data_url"),
        (data_url(b"x" * 10_001), "media_too_large"),
        (data_url(b"x" * 1_000_000), "media_too_large"),
    ],
)
def test_malformed_ones_are_refused(url: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(url)
    assert (caught.value.field, caught.value.code) == ("media", code)


def test_nothing_follows_the_padding_in_any_piece() -> None:
    with pytest.raises(InvalidRequestError, match="not valid base64"):
        decoded(HEADER + "QUI=", "QUI=")
    with pytest.raises(InvalidRequestError, match="not valid base64"):
        decoded(HEADER + "QUI=", "QU", "JD")
    with pytest.raises(InvalidRequestError, match="not valid base64"):
        decoded(HEADER + "QUI=", "QUI")
