"""Pictures in the text of a prompt, in text-generation-webui's form."""

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.api.prompts import prompt_and_media, split_pictures
from raylens.preprocess.schema import InterleavedPrompt, TextPrompt

# The form as text-generation-webui has it.
THEIRS = re.compile(r'<img src="data:image/jpeg;base64,([A-Za-z0-9+/=]+)">')


def picture(data: str = "AAAA", kind: str = "jpeg") -> str:
    return f'<img src="data:image/{kind};base64,{data}">'


def test_texts_and_pictures_take_turns() -> None:
    text = f"one {picture('AA==')}two{picture('BBBB', 'png')}{picture('CC+/', 'webp')} three"
    assert split_pictures(text) == (
        ["one ", None, "two", None, None, " three"],
        ["data:image/jpeg;base64,AA==", "data:image/png;base64,BBBB", "data:image/webp;base64,CC+/"],
    )
    assert split_pictures("") == ([], [])
    prompt, media = prompt_and_media(text, None, "prompt")
    assert isinstance(prompt, InterleavedPrompt)
    assert [source.field for source in media] == ["prompt"] * 3
    assert prompt_and_media("no picture", None, "prompt") == (TextPrompt("no picture"), [])


@pytest.mark.parametrize(
    "text",
    [
        picture("AAAA", "svg+xml"),
        picture("AA AA"),
        picture(""),
        picture("AA\nAA"),
        picture().replace("<img ", "<img  "),
        picture().replace("<img", "<IMG"),
        picture().replace('">', '" />'),
        picture().replace("src", 'onerror="x" src'),
        picture().replace("data:image/jpeg;base64,", "https://example.com/"),
        '<img src="data:image/jpeg;base64,AAAA',
    ],
)
def test_any_other_form_is_text(text: str) -> None:
    assert split_pictures(text) == ([text], [])


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["<img", ' src="', "data:image/jpeg;base64,", "data:image/gif;base64,", "AAAA", '">', "=", "<", "\0"]
        ),
        st.text(alphabet=string.printable, max_size=5),
        st.builds(picture, st.text(alphabet=string.ascii_letters + "+/=", max_size=6)),
    ),
    max_size=20,
)


@pytest.mark.long
@given(pieces=PIECES)
@settings(max_examples=500, deadline=None)
def test_nothing_is_lost_and_every_picture_of_theirs_is_found(pieces: list[str]) -> None:
    text = "".join(pieces)
    parts, urls = split_pictures(text)
    remaining = iter(urls)
    assert "".join(f'<img src="{next(remaining)}">' if part is None else part for part in parts) == text
    assert next(remaining, None) is None
    assert [url for url in urls if url.startswith("data:image/jpeg")] == [
        f"data:image/jpeg;base64,{data}" for data in THEIRS.findall(text)
    ]
    assert all(split_pictures(part) == ([part], []) for part in parts if part)


@pytest.mark.parametrize("unit", ["<img", '<img src="', '<img src="data:image/jpeg;base64,', "A", picture()])
def test_time_grows_with_the_length_only(unit: str) -> None:
    """A quadratic parser would take minutes for these ten megabytes, far beyond the time that a test may take."""
    split_pictures(unit * (10**7 // len(unit)))
