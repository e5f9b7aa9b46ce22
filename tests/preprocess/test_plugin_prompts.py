"""Prompts of a text model with a plug-in: pictures with their markers in the text, and prompts cut from the left."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import (
    ChatPrompt,
    InterleavedPrompt,
    InvalidRequestError,
    ItemInfo,
    PromptTruncation,
    TextPrompt,
)
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.preprocess.test_precomputed import content
from tests.preprocess.vision_plugins import plug_in
from tests.preprocess.vision_plugins.test_registry import PARAMS

TEXTS = ["", "a", "a<", "Look: ", " and ", "\n", "> b", "Img", "<Img", "/Img>", "one two three", "é"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plug_in.make_text_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def processor(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    folder: Path = tmp_path_factory.mktemp("plug-ins")
    (folder / "blocks.py").write_text(plug_in.MODULE)
    choice = VisionPluginChoice(plug_in.NAME, str(folder), PARAMS)
    return MultiModalProcessor(ProcessorConfig(checkpoint, vision_plugin=choice))


def test_what_the_plug_in_is_told_is_a_part_of_an_items_identity(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(plug_in.MODULE)

    def fingerprint(**params: Any) -> str:
        choice = VisionPluginChoice(plug_in.NAME, str(tmp_path), {**PARAMS, **params})
        return MultiModalProcessor(ProcessorConfig(checkpoint, vision_plugin=choice)).identity.fingerprint

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(vision_bits=8), fingerprint(projector="elsewhere")}) == 3


@pytest.fixture(scope="module")
def tokenizer(checkpoint: str) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def info(processor: MultiModalProcessor) -> ItemInfo:
    info, tensors = processor.items.process("image", encoded(Image.new("RGB", (30, 20), "red")))
    assert tensors["pixels"].shape == (20, 30, 3)
    assert info.num_embeds == plug_in.NUM_EMBEDS
    return info


def test_a_client_may_send_the_pixels_themselves(processor: MultiModalProcessor) -> None:
    image = picture(0)
    size = (image.height, image.width)
    _, expected = processor.items.process("image", encoded(image))
    accepted, tensors = processor.items.accept("image", content(size, expected))
    assert accepted.num_embeds == plug_in.NUM_EMBEDS
    assert torch.equal(tensors["pixels"], expected["pixels"])
    for wrong in (expected["pixels"].float(), expected["pixels"].long(), expected["pixels"][1:]):
        with pytest.raises(InvalidRequestError, match="pixels is "):
            processor.items.accept("image", content(size, {"pixels": wrong}))


def expected_ids(tokenizer: Any, texts: list[str]) -> list[int]:
    """The texts with a picture between any two of them, each with its markers."""
    ids: list[int] = []
    for index, text in enumerate(texts):
        is_last = index == len(texts) - 1
        whole = (plug_in.END if index else "") + text + ("" if is_last else plug_in.START)
        ids += tokenizer(whole, add_special_tokens=index == 0)["input_ids"]
        ids += [] if is_last else [plug_in.PLACEHOLDER] * plug_in.NUM_EMBEDS
    return ids


def parts_of(texts: list[str]) -> list[str | None]:
    parts: list[str | None] = [texts[0]]
    for text in texts[1:]:
        parts += [None, text]
    return parts


texts_of_prompts = st.lists(st.sampled_from(TEXTS), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(texts_of_prompts)
def test_markers_merge_with_the_text_around_them(
    processor: MultiModalProcessor, tokenizer: Any, info: ItemInfo, texts: list[str]
) -> None:
    num_items = len(texts) - 1
    prompt = processor.prompts.render(InterleavedPrompt(parts_of(texts)), [info] * num_items, ["h"] * num_items)
    assert prompt.prompt_token_ids == expected_ids(tokenizer, texts)
    for placeholder in prompt.placeholders:
        own = prompt.prompt_token_ids[placeholder.offset : placeholder.offset + placeholder.length]
        assert own == [plug_in.PLACEHOLDER] * plug_in.NUM_EMBEDS


def test_a_conversation_has_its_pictures_in_its_text(
    processor: MultiModalProcessor, tokenizer: Any, info: ItemInfo
) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What? <image> <Img>"}]
    prompt = processor.prompts.render(ChatPrompt([{"role": "user", "content": content}]), [info], ["h"])
    (picture,) = prompt.placeholders
    ids = prompt.prompt_token_ids
    assert tokenizer.decode(ids[1 : picture.offset]) == "user: <Img>"
    # What a user types is text, whatever it looks like.
    after = tokenizer.decode(ids[picture.offset + picture.length :])
    assert after == "</Img>\nWhat? <image> <Img>\nassistant:"


@settings(max_examples=60, deadline=None)
@given(texts_of_prompts, st.integers(1, 60))
def test_a_cut_prompt_has_whole_pictures_and_no_marker_left(
    processor: MultiModalProcessor, tokenizer: Any, info: ItemInfo, texts: list[str], limit: int
) -> None:
    # Markers that the texts spell out themselves are text.
    texts = [text for text in texts if "Img" not in text] or [""]
    num_items = len(texts) - 1
    infos, hashes = [info] * num_items, [f"h{index}" for index in range(num_items)]
    whole = processor.prompts.render(InterleavedPrompt(parts_of(texts)), infos, hashes)
    cut = processor.prompts.render(
        InterleavedPrompt(parts_of(texts)), infos, hashes, truncation=PromptTruncation(limit)
    )
    num_cut = len(whole.prompt_token_ids) - len(cut.prompt_token_ids)
    assert len(cut.prompt_token_ids) <= limit
    assert cut.prompt_token_ids == whole.prompt_token_ids[num_cut:]
    kept = [placeholder for placeholder in whole.placeholders if placeholder.offset >= num_cut]
    assert [one.offset + num_cut for one in cut.placeholders] == [one.offset for one in kept]
    assert cut.mm_hashes == hashes[num_items - len(kept) :]
    # The text that is left, with a sign for each picture's positions.
    rest, position = "", 0
    for placeholder in cut.placeholders:
        rest += tokenizer.decode(cut.prompt_token_ids[position : placeholder.offset]) + "#"
        position = placeholder.offset + placeholder.length
    rest += tokenizer.decode(cut.prompt_token_ids[position:])
    assert rest.count("#") == len(cut.placeholders)
    without_pictures = rest.replace(f"{plug_in.START}#{plug_in.END}", "")
    assert not re.search(r"Img|#", without_pictures)


LITERAL = "What does <image> mean?"


def test_a_placeholder_that_no_picture_comes_with_is_text(
    processor: MultiModalProcessor, tokenizer: Any, info: ItemInfo
) -> None:
    """The text model's own tokenizer knows no such token."""
    expected = tokenizer(LITERAL)["input_ids"]
    assert processor.prompts.render(TextPrompt(LITERAL), [], []).prompt_token_ids == expected
    assert processor.prompts.tokenize(TextPrompt(LITERAL)) == expected
    assert processor.prompts.tokenize(TextPrompt("</s>" + LITERAL)) == tokenizer("</s>" + LITERAL)["input_ids"]
    for texts in (["", LITERAL], [LITERAL, ""], [LITERAL, LITERAL]):
        prompt = processor.prompts.render(InterleavedPrompt(parts_of(texts)), [info], ["h"])
        assert prompt.prompt_token_ids == expected_ids(tokenizer, texts)


def test_a_text_with_its_own_placeholders(processor: MultiModalProcessor, tokenizer: Any, info: ItemInfo) -> None:
    """As the client of completions writes it who sends pictures beside the prompt."""
    prompt = processor.prompts.render(TextPrompt("a <Img><image></Img> b"), [info], ["h"])
    assert prompt.prompt_token_ids == expected_ids(tokenizer, ["a ", " b"])
