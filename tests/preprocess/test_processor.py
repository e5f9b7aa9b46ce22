"""Item by item gives what one call of the Hugging Face processor gives; user text stays text."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from raylens.preprocess.media import MediaLimits
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import (
    ChatPrompt,
    InvalidRequestError,
    ItemExpansion,
    ItemInfo,
    Message,
    PlaceholderRange,
    ProcessedPrompt,
)
from tests.pictures import disc, encoded

PICTURES = [disc("red"), disc("blue", (90, 200)), disc("green", (500, 120))]
ITEM = ItemInfo("image", ItemExpansion(np.full(36, 3, np.int32), PlaceholderRange(0, 36)), num_bytes=0)


@pytest.fixture(scope="module")
def processor(shapes: str) -> MultiModalProcessor:
    return MultiModalProcessor(ProcessorConfig(shapes, image_backend="pil"))


@pytest.fixture(scope="module")
def hf_processor(shapes: str) -> Any:
    return AutoProcessor.from_pretrained(shapes, backend="pil")


def render(
    processor: MultiModalProcessor, messages: list[Message], items: list[ItemInfo], hashes: list[str]
) -> ProcessedPrompt:
    return processor.prompts.render(ChatPrompt(messages), items, hashes)


def user(num_images: int, text: str) -> list[Message]:
    return [{"role": "user", "content": [{"type": "image"}] * num_images + [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("num_images", [0, 1, 3])
@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_equals_the_one_shot_call(
    processor: MultiModalProcessor, hf_processor: Any, num_images: int, file_format: str
) -> None:
    contents = [encoded(picture, file_format) for picture in PICTURES[:num_images]]
    messages = user(num_images, "What is in the second image?")
    processed = [processor.items.process("image", content) for content in contents]
    prompt = render(processor, messages, [info for info, _ in processed], ["hash"] * num_images)

    text = hf_processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
    expected = hf_processor(text=text, images=images or None, return_tensors="pt")
    assert prompt.prompt_token_ids == expected["input_ids"][0].tolist()
    for i, (info, tensors) in enumerate(processed):
        assert torch.equal(tensors["pixel_values"], expected["pixel_values"][i])
        assert info.num_bytes == tensors["pixel_values"].nbytes


def test_placeholders_are_where_the_image_tokens_are(processor: MultiModalProcessor) -> None:
    prompt = render(processor, user(3, "Hello"), [ITEM] * 3, ["a", "b", "c"])
    positions = [position for place in prompt.placeholders for position in range(place.offset, place.offset + 36)]
    assert positions == [i for i, token in enumerate(prompt.prompt_token_ids) if token == 3]
    assert prompt.mm_hashes == ["a", "b", "c"]


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.sampled_from(["<image>", "</s>", "<s>", "a", " ", "é"]), max_size=8))
def test_control_tokens_that_users_type_stay_text(processor: MultiModalProcessor, parts: list[str]) -> None:
    text = "".join(parts)
    plain = render(processor, user(1, "x"), [ITEM], ["h"])
    prompt = render(processor, user(1, text), [ITEM], ["h"])
    assert prompt.placeholders == plain.placeholders
    for control in (1, 2, 3):  # <s>, </s>, <image>
        assert prompt.prompt_token_ids.count(control) == plain.prompt_token_ids.count(control)


def test_conversations_keep_their_turns_apart(processor: MultiModalProcessor) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        *user(1, "What colour is the circle?"),
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        *user(1, "And now?"),
    ]
    prompt = render(processor, messages, [ITEM, ITEM], ["a", "b"])
    first, second = prompt.placeholders
    assert first.offset + first.length < second.offset
    assert second == PlaceholderRange(second.offset, 36)


@pytest.mark.parametrize("num_items", [0, 1, 3])
def test_a_wrong_number_of_items_is_an_error(processor: MultiModalProcessor, num_items: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(processor, user(2, "Hello"), [ITEM] * num_items, ["h"] * num_items)
    assert caught.value.code == "placeholder_mismatch"


def test_a_prompt_longer_than_the_context_is_refused(processor: MultiModalProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="2048 tokens") as caught:
        render(processor, user(0, "x " * 3000), [], [])
    assert (caught.value.field, caught.value.code) == ("messages", "context_length_exceeded")


def test_output_is_in_the_encoders_dtype(shapes: str) -> None:
    processor = MultiModalProcessor(ProcessorConfig(shapes, dtype=torch.bfloat16))
    info, tensors = processor.items.process("image", encoded(disc("red")))
    assert tensors["pixel_values"].dtype == torch.bfloat16
    assert info.num_bytes == 3 * 96 * 96 * 2


def test_the_fingerprint_tells_settings_apart(shapes: str, processor: MultiModalProcessor) -> None:
    same = MultiModalProcessor(ProcessorConfig(shapes, image_backend="pil", limits=MediaLimits(max_items=3)))
    other = MultiModalProcessor(ProcessorConfig(shapes, image_backend="pil", dtype=torch.bfloat16))
    torchvision = MultiModalProcessor(ProcessorConfig(shapes, image_backend="torchvision"))
    revision = MultiModalProcessor(ProcessorConfig(shapes, image_backend="pil", revision="another"))
    assert processor.identity == same.identity
    fingerprints = {one.identity.fingerprint for one in (processor, other, torchvision, revision)}
    assert len(fingerprints) == 4


def test_an_unsupported_family_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="'gpt2'.*only.*llava"):
        MultiModalProcessor(ProcessorConfig(str(tmp_path)))


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequestError("m", field="f", code="c", status=404)))
    assert (str(error), error.field, error.code, error.status) == ("f: m", "f", "c", 404)
    assert str(error.for_field("g")) == "g: m"
