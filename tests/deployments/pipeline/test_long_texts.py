"""Bodies with long texts: parsed without these, and the same in the end."""

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from raylens.deployments.pipeline.long_texts import SLICE_BYTES, LongTexts

LONG = base64.b64encode(os.urandom(3 * SLICE_BYTES)).decode()
URL = f"data:image/png;base64,{LONG}"


def read(body: bytes, chunk_bytes: int = 50_000) -> tuple[bytes, LongTexts]:
    """What is left to parse of a body that comes in chunks."""
    texts = LongTexts()
    kept = [texts.take(body[at : at + chunk_bytes]) for at in range(0, len(body), chunk_bytes)]
    return b"".join([*kept, texts.rest()]), texts


def parsed(value: Any, **options: Any) -> Any:
    kept, texts = read(json.dumps(value, **options).encode())
    return texts.restored(from_json(kept))


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("chunk_bytes", [1000, SLICE_BYTES, 50_000, 10**9])
def test_pictures_are_left_out_of_what_is_parsed(chunk_bytes: int) -> None:
    body = json.dumps(chat(picture(URL), {"type": "text", "text": "What?"}, picture(URL))).encode()
    kept, texts = read(body, chunk_bytes)
    assert len(kept) < 4 * SLICE_BYTES + 1000 < len(body) / 1.5
    found = texts.restored(from_json(kept))["messages"][0]["content"]
    assert [b"".join(texts.pieces(found[index]["image_url"]["url"])) for index in (0, 2)] == [URL.encode()] * 2
    assert found[1]["text"] == "What?"


@pytest.mark.parametrize("key", ["data", "url", "image", "other"])
def test_the_input_of_a_tool_call_is_no_media(key: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {key: LONG, "deep": [{key: LONG}]}}
    assert parsed(chat(call)) == chat(call)


SAFE_IN_URLS = f"data:image/png;base64,{base64.urlsafe_b64encode(os.urandom(3 * SLICE_BYTES + 1)).decode().rstrip('=')}"


@pytest.mark.parametrize("key", ["image_url", "video_url", "audio_url"])
def test_a_url_that_is_a_plain_text_is_left_out_too(key: str) -> None:
    kept, texts = read(json.dumps(chat({key: SAFE_IN_URLS}, {"text": "What?"})).encode())
    assert len(kept) < 2 * SLICE_BYTES + 1000
    url = texts.restored(from_json(kept))["messages"][0]["content"][0][key]
    assert len(url) < 2 * SLICE_BYTES
    assert b"".join(texts.pieces(url)) == SAFE_IN_URLS.encode()


def test_a_sound_in_base64_is_left_out_too() -> None:
    body = chat({"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}, {"text": "What?"})
    kept, texts = read(json.dumps(body).encode())
    assert len(kept) < 2 * SLICE_BYTES + 1000
    data = texts.restored(from_json(kept))["messages"][0]["content"][0]["input_audio"]["data"]
    assert b"".join(texts.pieces(data)) == LONG.encode()


@pytest.mark.parametrize(
    "body",
    [
        chat({"type": "text", "text": LONG}),
        chat({"type": "text", "text": URL}),
        {"model": "m", "messages": [{"role": "user", "content": LONG}]},
        {"model": "m", "prompt": f"say {LONG} twice: {LONG}"},
        {"model": "m", "prompt": [f"<img src={LONG}", "b"]},
        {"model": "m", "messages": [], "tools": [{"url": URL}], "metadata": {"image_url": URL}},
        {"tokens": list(range(40_000))},
        {LONG: LONG, "x": {LONG: [LONG]}},
        [LONG],
        LONG,
        {"x": " " * 4 * SLICE_BYTES},
        {"x": "Ã¤" * 4 * SLICE_BYTES},
        {"x": "a, b" * 4 * SLICE_BYTES},
        {"x": "\\" * 4 * SLICE_BYTES},
    ],
    ids=lambda body: type(body).__name__,
)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_texts_that_are_no_media_are_whole_again(body: Any, ensure_ascii: bool) -> None:
    assert parsed(body, ensure_ascii=ensure_ascii) == body
    assert parsed(body, ensure_ascii=ensure_ascii, indent=4) == body


def test_outside_of_texts_all_stays() -> None:
    """So that the limit for JSON bounds what is none."""
    body = b"{" + b"x" * 4 * SLICE_BYTES
    assert read(body)[0] == body
    assert len(read(b'{"' + body[2:])[0]) < 2 * SLICE_BYTES


def test_pictures_in_a_prompt_stay_apart_and_what_is_between_them_does_not() -> None:
    body = {"prompt": f'before {LONG} <img src="data:image/jpeg;base64,{LONG}"> between {LONG}'}
    kept, texts = read(json.dumps(body).encode())
    prompt = texts.restored(from_json(kept))["prompt"]
    assert prompt.startswith(f"before {LONG} <img")
    assert prompt.endswith(f"> between {LONG}")
    assert len(prompt) < 2.7 * len(LONG), "the picture is not in it"
    assert b"".join(texts.pieces(prompt)).decode() == body["prompt"]


@given(st.integers(0, 12), st.sampled_from(["\\u00e9", "\\n", "\\\\", '\\"', "Ã¤"]))
def test_an_escape_is_never_cut(offset: int, escape: str) -> None:
    """Wherever the border between two slices falls."""
    head = '{"x": "'
    text = "a" * (SLICE_BYTES - len(head) - offset) + escape + "b" * 3 * SLICE_BYTES
    body = f'{head}{text}"}}'.encode()
    kept, texts = read(body)
    assert texts.restored(from_json(kept)) == json.loads(body)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.sampled_from([LONG, URL, "x" * SLICE_BYTES]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@given(values, st.integers(1, 3 * SLICE_BYTES))
@settings(max_examples=60, deadline=None)
def test_any_body_in_any_chunks_is_the_same(body: Any, chunk_bytes: int) -> None:
    encoded = json.dumps(body).encode()
    kept, texts = read(encoded, max(chunk_bytes, len(encoded) // 50 + 1))
    assert whole(texts, texts.restored(from_json(kept))) == body


def whole(texts: LongTexts, value: Any) -> Any:
    """With media, too."""
    if isinstance(value, str):
        return b"".join(texts.pieces(value)).decode()
    if isinstance(value, list):
        return [whole(texts, one) for one in value]
    if isinstance(value, dict):
        return {key: whole(texts, one) for key, one in value.items()}
    return value


def marks() -> Iterator[str]:
    for _ in range(2):
        yield read(json.dumps({"x": LONG}).encode())[0].decode().split('"x": "')[1][-60:]


def test_marks_cannot_be_guessed() -> None:
    first, second = marks()
    assert first != second


def test_a_stretch_outside_of_texts_is_still_no_json() -> None:
    kept, _ = read(b'{"x": ' + b"1" * 4 * SLICE_BYTES + b"}")
    with pytest.raises(ValueError, match="at line 1 column"):
        from_json(kept)
