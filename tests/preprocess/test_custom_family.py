"""A model that transformers has no processor for: a processor class and a kind of media of one's own, plugged in."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from raylens.modeling.families import FAMILIES, Family, load_family
from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.prompt_updates import PromptReplacement
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, TextPrompt
from tests.pictures import disc, encoded
from tests.preprocess.small_processors import save_processor
from tests.preprocess.small_tokenizers import PAD

WAVE = PAD  # any special token will do for a test


class MyProcessor(ProcessorMixin):
    """Eight positions a picture, put together with a `__call__` of its own as older processors have it."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token = "<image>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> "MyProcessor":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        return cls(CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28), tokenizer)

    def __call__(self, images: Any, text: str, **options: Any) -> Any:
        pixels = self.image_processor(images, return_tensors="pt")["pixel_values"]
        expanded = text.replace("<image>", "<image>" * 8)
        return {"input_ids": [self.tokenizer(expanded)["input_ids"]], "pixel_values": pixels}


def run_whole(processor: HFProcessor, image: Any, kwargs: Kwargs) -> Outputs:
    """By its `__call__`, with a text of one placeholder."""
    outputs: Outputs = processor(images=[image], text="<image>")
    return outputs


def decode_wave(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> Any:
    if len(content) % 4:
        raise InvalidRequestError(f"{len(content)} bytes are no float32 samples", field="media", code="invalid_wave")
    return np.frombuffer(content, np.float32)


def run_wave(processor: HFProcessor, wave: Any, kwargs: Kwargs) -> Outputs:
    return {"samples": torch.tensor(wave), "length": len(wave)}


WAVES = Modality(
    fields={"samples": whole},
    update=lambda processor: PromptReplacement(WAVE),
    embed_token=lambda processor: WAVE,
    size_outputs=lambda processor, *size: {},
    largest=lambda processor, kwargs: [],
    decode=decode_wave,
    run=run_wave,
    expansion=lambda processor, outputs, kwargs: WAVE * (outputs["length"] // 2),
)


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MultiModalProcessor:
    llava = load_family("preprocess", "llava")
    image = dataclasses.replace(
        llava.modalities["image"], run=run_whole, expansion=lambda processor, outputs, kwargs: "<image>" * 8
    )
    family = dataclasses.replace(llava, processor_class=MyProcessor, modalities={"image": image, "wave": WAVES})
    module = SimpleNamespace(FAMILY=family)
    monkeypatch.setitem(sys.modules, "raylens.preprocess.models.of_ones_own", module)
    monkeypatch.setitem(FAMILIES, "llava", Family("of_ones_own:FAMILY"))
    return MultiModalProcessor(ProcessorConfig(save_processor("llava", "metaspace", tmp_path, chat_template=False)))


def test_a_processor_without_hooks_is_run_by_its_call(processor: MultiModalProcessor, tmp_path: Path) -> None:
    pictures = [disc("red"), disc("blue", (90, 200))]
    text = "One <image> and\n<image> two"
    items = [processor.items.process("image", encoded(one), num_in_prompt=2) for one in pictures]
    prompt = processor.prompts.render(TextPrompt(text), [info for info, _ in items], ["a", "b"])
    expected = MyProcessor.from_pretrained(str(tmp_path))(pictures, text)
    assert prompt.prompt_token_ids == expected["input_ids"][0]
    assert [placeholder.length for placeholder in prompt.placeholders] == [8, 8]
    assert all(
        torch.equal(tensors["pixel_values"], expected["pixel_values"][index])
        for index, (_, tensors) in enumerate(items)
    )


def test_a_kind_of_media_of_ones_own(processor: MultiModalProcessor) -> None:
    waves = [np.arange(size, dtype=np.float32).tobytes() for size in (4, 10)]
    (first, first_tensors), (second, second_tensors) = (processor.items.process("wave", one) for one in waves)
    assert (first.num_embeds, second.num_embeds) == (2, 5)
    assert first_tensors["samples"].tolist() == [0, 1, 2, 3]
    assert len(second_tensors["samples"]) == 10

    image, _ = processor.items.process("image", encoded(disc("red")))
    prompt = processor.prompts.render(TextPrompt(f"a{WAVE}b<image>c{WAVE}"), [first, image, second], ["x", "y", "z"])
    lengths = [placeholder.length for placeholder in prompt.placeholders]
    offsets = [placeholder.offset for placeholder in prompt.placeholders]
    assert lengths == [2, 8, 5]
    assert offsets == sorted(offsets)
    with pytest.raises(InvalidRequestError, match="9 bytes are no float32"):
        processor.items.process("wave", b"9 bytes, ")


def test_media_that_the_model_does_not_take_is_refused(processor: MultiModalProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="takes image, wave, not video"):
        processor.items.process("video", b"")


def test_no_chat_template_is_an_error_of_chats_only(processor: MultiModalProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        processor.prompts.render(ChatPrompt([{"role": "user", "content": []}]), [], [])
    assert processor.prompts.render(TextPrompt("Hello"), [], []).prompt_token_ids
