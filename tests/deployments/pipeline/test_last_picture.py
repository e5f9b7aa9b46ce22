"""Of a conversation's pictures the last one stays, with all text and all other media."""

from typing import Any

import pytest

from raylens.deployments.pipeline.last_picture import with_last_picture
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import ChatPrompt, InterleavedPrompt, Prompt, TextPrompt, TokensPrompt

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def sources(*names: str) -> list[MediaSource]:
    return [MediaSource(name, "f", "video" if name.startswith("v") else "image") for name in names]


def left(prompt: Prompt, *names: str) -> tuple[Prompt, list[str | None]]:
    found, media = with_last_picture(prompt, sources(*names))
    return found, [source.url for source in media]


def test_in_a_conversation() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("a"), VIDEO]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [IMAGE, text("c"), IMAGE, text("d")]},
        {"role": "user", "content": [text("e")]},
    ]
    expected = [
        messages[0],
        {"role": "user", "content": [text("a"), VIDEO]},
        messages[2],
        {"role": "user", "content": [text("c"), IMAGE, text("d")]},
        messages[4],
    ]
    prompt = ChatPrompt(messages, continue_final_message=True, add_generation_prompt=False)
    found, names = left(prompt, "i1", "v1", "i2", "i3")
    assert isinstance(found, ChatPrompt)
    assert found.messages == expected
    assert (found.continue_final_message, found.add_generation_prompt) == (True, False)
    assert names == ["v1", "i3"]
    assert messages[1]["content"] == [IMAGE, text("a"), VIDEO], "the client's own is as it was"


def test_in_a_text() -> None:
    found, names = left(InterleavedPrompt(["a", None, "b", None, None, "c"]), "i1", "i2", "i3")
    assert (found, names) == (InterleavedPrompt(["a", "b", None, "c"]), ["i3"])


@pytest.mark.parametrize("prompt", [TextPrompt("<image> and <image>"), TokensPrompt([5, 7, 5])])
def test_pictures_beside_a_prompt_stay(prompt: Prompt) -> None:
    assert left(prompt, "i1", "i2") == (prompt, ["i1", "i2"])


def test_a_single_picture_stays() -> None:
    prompt = ChatPrompt([{"role": "user", "content": [IMAGE, text("a")]}])
    assert left(prompt, "i1") == (prompt, ["i1"])
