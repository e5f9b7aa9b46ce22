"""WeMM's processor beside its description, on pictures of any size, and its tokenizer beside sentencepiece itself."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from raylens.modeling.families import load_family
from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ChatPrompt
from tests.pictures import encoded
from tests.preprocess.small_processors import save_processor
from tests.wemm_reference import reference_num_embeds, reference_pixels, reference_size

SIZE = {"shortest_edge": 50, "longest_edge": 150}
PUBLISHED_SIZE = {"shortest_edge": 756, "longest_edge": 1960}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    folder = tmp_path_factory.mktemp("wemm")
    return MultiModalProcessor(ProcessorConfig(save_processor("wemm", "byte_level", folder)))


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 400), st.integers(4, 400))
def test_pixels_and_numbers_of_positions_are_those_of_the_description(
    processor: MultiModalProcessor, width: int, height: int
) -> None:
    image = noise(width, height)
    expected = reference_pixels(image, SIZE)
    info, tensors = processor.items.process("image", encoded(image))
    assert torch.allclose(tensors["pixel_values"], expected, rtol=0, atol=1e-6)
    assert tensors["patch_attention_mask"].all()
    assert info.num_embeds == reference_num_embeds(*expected.shape[1:])
    by_size = processor.items.expansion_for_size("image", (height, width))
    assert by_size.token_ids.tolist() == info.expansion.token_ids.tolist()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    """With the sizes of the published settings, which hold without any in the checkpoint."""
    folder = tmp_path_factory.mktemp("published")
    path = save_processor("wemm", "byte_level", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_processor": {}}))
    return MultiModalProcessor(ProcessorConfig(path))


PUBLISHED_NUMBERS = {(800, 600): 947, (640, 480): 947, (1024, 768): 947, (1960, 1000): 632, (100, 3001): 492}
"""Of positions by (width, height), counted by hand: 800 x 600 becomes 1960 x 1470, which are 140 x 105 patches, so 35
times 27 positions and the two splitters."""


@pytest.mark.parametrize("size", PUBLISHED_NUMBERS)
def test_small_pictures_grow_to_the_published_size(published: MultiModalProcessor, size: tuple[int, int]) -> None:
    found = published.items.expansion_for_size("image", size[::-1]).features.num_embeds
    assert found == PUBLISHED_NUMBERS[size]


def test_pixels_at_the_published_size(published: MultiModalProcessor) -> None:
    image = noise(80, 60)
    info, tensors = published.items.process("image", encoded(image))
    assert torch.allclose(tensors["pixel_values"], reference_pixels(image, PUBLISHED_SIZE), rtol=0, atol=1e-6)
    assert (info.num_embeds, tensors["pixel_values"].shape) == (947, (3, 1470, 1960))


def test_no_picture_takes_more_positions_than_the_largest(processor: MultiModalProcessor) -> None:
    most, _ = processor.items.largest_item("image")
    sizes = [(1, 1), (1, 4000), (4000, 1), (150, 150), (149, 4000), (4000, 3999)]
    assert most.num_embeds == max(
        processor.items.expansion_for_size("image", size).features.num_embeds for size in sizes
    )


@pytest.mark.long
def test_positions_at_the_published_size(published: MultiModalProcessor) -> None:
    for width, height in [
        (4, 4),
        (100, 80),
        (755, 757),
        (3000, 1000),
        (1000, 3001),
        (1960, 1961),
        (4, 4000),
        (4000, 4),
    ]:
        wide, high = reference_size(width, height, PUBLISHED_SIZE)
        found = published.items.expansion_for_size("image", (height, width)).features.num_embeds
        assert found == reference_num_embeds(high, wide)
    assert published.items.largest_item("image")[0].num_embeds == 35 * 35 + 2


def test_what_is_transparent_is_white(processor: MultiModalProcessor) -> None:
    image = Image.new("RGBA", (60, 60), (255, 0, 0, 0))
    _, tensors = processor.items.process("image", encoded(image))
    assert torch.equal(tensors["pixel_values"][:, :60, :60], torch.ones(3, 60, 60))


TEXT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_a_chat_template_that_knows_no_pictures_is_not_used(tmp_path: Path) -> None:
    """The tokenizer of the published text model may bring one."""
    folder = save_processor("wemm", "byte_level", tmp_path, chat_template=False)
    for template, is_used in ((TEXT_TEMPLATE, False), (TEXT_TEMPLATE + "{# image #}", True)):
        (tmp_path / "chat_template.jinja").write_text(template)
        prompts = MultiModalProcessor(ProcessorConfig(folder)).prompts
        prompt = prompts.render(ChatPrompt([{"role": "user", "content": "Hi"}]), [], [])
        tokenizer = load_processor(load_family("preprocess", "wemm"), folder).tokenizer
        assert ("<|im_start|>" in tokenizer.decode(prompt.prompt_token_ids)) != is_used


def save_sentencepiece(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Makes the folder's tokenizer a sentencepiece model, as published: its control tokens stand in for unused ones."""
    (folder / "tokenizer.json").unlink()
    (folder / "text.txt").write_text("What is in the picture? A red circle is left of the blue square.\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["[UNUSED_TOKEN_0]", "[UNUSED_TOKEN_1]"],
        minloglevel=2,
    )
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "<|im_start|>", 4: "<|im_end|>"}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    added: dict[str, Any] = {str(index): {"content": name, **flags} for index, name in names.items()}
    tokenizer |= {"added_tokens_decoder": added, "add_bos_token": True, "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))


def test_a_sentencepiece_model_is_read_without_the_checkpoints_code(tmp_path: Path) -> None:
    folder = save_processor("wemm", "byte_level", tmp_path, chat_template=False)
    pieces = save_sentencepiece(tmp_path)
    prompts = MultiModalProcessor(ProcessorConfig(folder)).prompts
    found = prompts.render(ChatPrompt([{"role": "user", "content": "What is  the ü circle?"}]), [], [])
    text = "<|im_start|>user\nWhat is  the ü circle?<|im_end|><|im_start|>assistant\n"
    expected = [1]
    for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        expected += {"<|im_start|>": [3], "<|im_end|>": [4], "": []}.get(part) or pieces.encode(part) if part else []
    assert found.prompt_token_ids == expected
