"""What single model families do beyond the common case, compared with their Hugging Face processors."""

import functools
import io
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from raylens.modeling.families import load_family
from raylens.preprocess.hf_processor import ImageBackend, load_processor
from raylens.preprocess.models.phi4_multimodal import PHI4_MULTIMODAL
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import InvalidRequestError, ItemInfo, Prompt, TextPrompt, TokensPrompt
from tests.preprocess.parity import Pair, pair, picture
from tests.preprocess.small_processors import save_processor

PAN_AND_SCAN = {"do_pan_and_scan": True}


def drawn(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def ids_of(ours: MultiModalProcessor, prompt: Prompt, infos: list[ItemInfo]) -> list[int]:
    return ours.prompts.render(prompt, infos, ["hash"] * len(infos)).prompt_token_ids


def changed(
    model_type: str, folder: Path, file: str = "processor_config.json", **settings: Any
) -> tuple[MultiModalProcessor, Any]:
    """Our processor and Hugging Face's for a checkpoint with other settings in one of its files."""
    save_processor(model_type, "byte_level", folder)
    config = folder / file
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    ours = MultiModalProcessor(ProcessorConfig(str(folder), image_backend="torchvision"))
    return ours, load_processor(load_family("preprocess", model_type), str(folder), backend="torchvision")


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_gemma3_pan_and_scan(backend: ImageBackend) -> None:
    gemma = pair("gemma3", "byte_level", backend)
    # Cut in two, in four, not at all.
    pictures = [drawn(600, 300), drawn(260, 1100), drawn(300, 300)]
    text = gemma.prompt(["one\n", " two", "\n", "\n\nwhat?"])
    expected = gemma.theirs(text=text, images=[pictures], return_tensors="pt", **PAN_AND_SCAN)
    items = [gemma.ours.items.process("image", png(one), options=PAN_AND_SCAN) for one in pictures]
    infos = [info for info, _ in items]
    assert [info.num_embeds for info in infos] == [3 * 4, 5 * 4, 4]
    ids = expected["input_ids"][0].tolist()
    for prompt in (TextPrompt(text), TokensPrompt(gemma.theirs.tokenizer(text)["input_ids"]), TokensPrompt(ids)):
        assert ids_of(gemma.ours, prompt, infos) == ids
    gemma.check_placeholders(gemma.ours.prompts.render(TextPrompt(text), infos, ["hash"] * 3), infos)
    gemma.check_tensors([tensors for _, tensors in items], dict(expected))


@given(width=st.integers(1, 1500), height=st.integers(1, 1500), most=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_gemma3_crops_follow_from_the_size(width: int, height: int, most: int) -> None:
    gemma = pair("gemma3", "byte_level", "pil")
    options = PAN_AND_SCAN | {"pan_and_scan_max_num_crops": most}
    expansion = gemma.ours.items.expansion_for_size("image", (height, width), options=options)
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    crops = gemma.theirs.image_processor.pan_and_scan(image, 256, most, 1.2)
    assert expansion.features.num_embeds == (1 + len(crops)) * 4


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), most=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_gemma3_largest_with_pan_and_scan(width: int, height: int, most: int) -> None:
    gemma = pair("gemma3", "byte_level", "pil")
    options = PAN_AND_SCAN | {"pan_and_scan_max_num_crops": most}
    kwargs = {**gemma.theirs.images_kwargs, **options}
    (largest,) = gemma.family.modalities["image"].largest(gemma.theirs, kwargs)
    sizes = [(height, width), largest]
    some, best = (gemma.ours.items.expansion_for_size("image", size, options=options) for size in sizes)
    assert some.features.num_embeds <= best.features.num_embeds


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gemma3", {"do_pan_and_scan": 1}),
        ("gemma3", PAN_AND_SCAN | {"pan_and_scan_max_num_crops": 5}),
        ("molmo2", {"max_crops": 5}),
        ("molmo2", {"max_crops": 0}),
        ("minicpmv4_6", {"max_slice_nums": 5}),
        ("phi4_multimodal", {"dynamic_hd": 5}),
        ("phi4_multimodal", {"dynamic_hd": True}),
        ("chameleon", {"size": 7}),
    ],
)
def test_options_out_of_bounds(model_type: str, options: dict[str, object]) -> None:
    family = pair(model_type, "byte_level", "torchvision")
    with pytest.raises(InvalidRequestError, match=f"mm_processor_kwargs.{list(options)[-1]}"):
        family.ours.items.expansion_for_size("image", (64, 64), options=options)


@pytest.mark.parametrize(
    ("model_type", "option"),
    [("minicpmv4_6", "max_slice_nums"), ("molmo2", "max_crops"), ("phi4_multimodal", "dynamic_hd")],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_fewer_crops(model_type: str, option: str, number: int) -> None:
    family = pair(model_type, "byte_level", "torchvision")
    picture, text = drawn(1000, 300), family.prompt(["a", "b"])
    expected = family.theirs(text=text, images=[[picture]], return_tensors="pt", **{option: number})
    info, tensors = family.ours.items.process("image", png(picture), options={option: number})
    assert ids_of(family.ours, TextPrompt(text), [info]) == expected["input_ids"][0].tolist()
    family.check_tensors([tensors], dict(expected))


@pytest.mark.long
@given(width=st.integers(4, 1500), height=st.integers(4, 1500), most=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_minicpm_slices_follow_from_the_size(width: int, height: int, most: int) -> None:
    assume(max(width, height) <= 100 * min(width, height))
    minicpm, options = pair("minicpmv4_6", "byte_level", "torchvision"), {"max_slice_nums": most}
    rules, kwargs = minicpm.family.modalities["image"], {"max_slice_nums": most}
    outputs = minicpm.theirs.image_processor([drawn(width, height)], return_tensors="pt", **kwargs)
    counted = rules.size_outputs(minicpm.theirs, height, width, kwargs)
    assert {name: torch.as_tensor(counted[name]).tolist() for name in counted} == {
        name: torch.as_tensor(outputs[name]).tolist() for name in counted
    }
    (largest,) = rules.largest(minicpm.theirs, kwargs)
    some, best = (
        minicpm.ours.items.expansion_for_size("image", size, options=options) for size in ((height, width), largest)
    )
    assert some.features.num_embeds <= best.features.num_embeds


@pytest.mark.long
def test_no_picture_takes_more_tokens_than_the_largest_of_a_real_minicpm() -> None:
    """Its slices are of more patches than those of the small checkpoint."""
    image_processor = type(pair("minicpmv4_6", "byte_level", "torchvision").theirs.image_processor)()
    processor = SimpleNamespace(image_processor=image_processor)
    rules = load_family("preprocess", "minicpmv4_6").modalities["image"]

    def num_patches(size: tuple[int, ...]) -> int:
        return int(rules.size_outputs(processor, *size, {})["target_sizes"].prod(-1).sum())

    (largest,) = rules.largest(processor, {})
    assert max(largest) <= 100 * min(largest)
    sides = np.geomspace(40, 8000, 60).round().astype(int).tolist()
    sizes = [(high, wide) for high in sides for wide in sides if max(high, wide) <= 100 * min(high, wide)]
    assert 0.95 * num_patches(largest) <= max(map(num_patches, sizes)) <= num_patches(largest)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_minicpm_numbers_the_pictures_of_a_prompt(tmp_path: Path, is_numbered: bool) -> None:
    ours, theirs = changed("minicpmv4_6", tmp_path, "preprocessor_config.json", use_image_id=is_numbered)
    pictures = [drawn(64, 64), drawn(20, 120), drawn(64, 64)]
    text = "<|image_pad|>a<|image_pad|> 1 <|image_pad|>"
    expected = theirs(text=text, images=[pictures])["input_ids"][0].tolist()
    assert ("<image_id>2</image_id>" in theirs.tokenizer.decode(expected)) == is_numbered
    infos = [ours.items.process("image", png(one))[0] for one in pictures]
    for prompt in (TextPrompt(text), TokensPrompt(theirs.tokenizer(text)["input_ids"]), TokensPrompt(expected)):
        assert ids_of(ours, prompt, infos) == expected


@pytest.mark.parametrize("text", ["Hi, <image_placeholder> what?", "\nHi", ""])
def test_janus_system_prompt(tmp_path: Path, text: str) -> None:
    ours, theirs = changed("janus", tmp_path, use_default_system_prompt=True)
    pictures = [drawn(64, 64)] * text.count("<image_placeholder>")
    infos = [ours.items.process("image", png(one))[0] for one in pictures]
    expected = theirs(text=text, images=pictures or None)["input_ids"][0].tolist()
    assert theirs.tokenizer.decode(expected).startswith("<s>You are a helpful language and vision assistant.")
    assert ids_of(ours, TextPrompt(text), infos) == expected
    assert ids_of(ours, TokensPrompt(theirs.tokenizer(text)["input_ids"]), infos) == expected


@pytest.fixture
def florence() -> Pair:
    return pair("florence2", "byte_level", "pil")


@pytest.mark.parametrize(
    "text", ["<OD>", "<REGION_TO_OCR> 1,2,3 ", "<CAPTION_TO_PHRASE_GROUNDING>a {dog}", "a dog", ""]
)
def test_florence2_tasks(florence: Pair, text: str) -> None:
    florence.check(text, [0], florence.items([0]))
    florence.check(text, [], [])


def test_florence2_task_with_more_text(florence: Pair) -> None:
    text = "<OD> of dogs"
    infos = [info for info, _ in florence.items([0])]
    for prompt in (TextPrompt(text), TokensPrompt(florence.theirs.tokenizer(text)["input_ids"])):
        with pytest.raises(InvalidRequestError, match="Task token <OD> should be the only content"):
            ids_of(florence.ours, prompt, infos)


def test_florence2_keeps_other_ids_without_a_task(florence: Pair) -> None:
    letters = [index for letter in "Describe" for index in florence.theirs.tokenizer.encode(letter)[1:]]
    infos = [info for info, _ in florence.items([0])]
    ids = ids_of(florence.ours, TokensPrompt(letters), infos)
    assert ids[-len(letters) - 1 : -1] == letters


@pytest.mark.parametrize("number", [1, 3])
def test_paligemma_without_placeholders(number: int) -> None:
    paligemma = pair("paligemma", "metaspace", "pil")
    pictures = list(range(number))
    paligemma.check("answer en\nwhere? ", pictures, paligemma.items(pictures))


@pytest.mark.parametrize("text", ["<s>a<|image|>", "<s>", "<|image|><s>", " a<|image|>"])
def test_molmo2_beginning_is_there_but_once(text: str) -> None:
    molmo = pair("molmo2", "byte_level", "torchvision")
    pictures = [0] * text.count("<|image|>")
    molmo.check(text, pictures, molmo.items(pictures))


@pytest.mark.long
@given(width=st.integers(1, 400), height=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_molmo2_tokens_of_any_size(width: int, height: int) -> None:
    """Down to a pixel: pictures smaller than the crops' margins have a tiling too."""
    molmo = pair("molmo2", "byte_level", "torchvision")
    outputs = molmo.theirs.image_processor(np.zeros((height, width, 3), np.uint8), input_data_format="channels_last")
    expected = molmo.theirs.replace_image_token(outputs, image_idx=0)
    items = molmo.ours.items
    expansion = items.expansion_for_size("image", (height, width))
    assert expansion.token_ids.tolist() == molmo.theirs.tokenizer.encode(expected)
    most = items.expansion_for_size("image", items.largest_size("image"))
    assert expansion.features.num_embeds <= most.features.num_embeds


@functools.cache
def phi4_of_small_crops() -> Any:
    """Its crops have two by two patches, so that many fit into a small picture."""
    with tempfile.TemporaryDirectory(prefix="raylens-processor-") as folder:
        save_processor("phi4_multimodal", "byte_level", Path(folder))
        processor = load_processor(PHI4_MULTIMODAL, folder, backend="torchvision")
    processor.image_processor.size = {"height": 28, "width": 28}
    return processor


@given(width=st.integers(1, 300), height=st.integers(1, 300), most=st.integers(1, 36))
@settings(max_examples=200, deadline=None)
def test_phi4_tokens_of_any_size(width: int, height: int, most: int) -> None:
    phi4, rules, kwargs = phi4_of_small_crops(), PHI4_MULTIMODAL.modalities["image"], {"dynamic_hd": most}
    image = np.zeros((height, width, 3), np.uint8)
    try:
        outputs = phi4.image_processor(image, input_data_format="channels_last", **kwargs)
    except ValueError:  # "the aspect ratio is very extreme"
        with pytest.raises(InvalidRequestError, match="too narrow for this model"):
            rules.size_outputs(phi4, height, width, kwargs)
        return
    (number,) = outputs["num_img_tokens"]
    assert rules.size_outputs(phi4, height, width, kwargs)["num_img_tokens"] == [number]
    sizes = rules.largest(phi4, kwargs)
    assert number <= max(rules.size_outputs(phi4, *size, kwargs)["num_img_tokens"][0] for size in sizes)


def test_phi4_refuses_a_picture_that_is_too_narrow() -> None:
    ours = pair("phi4_multimodal", "byte_level", "torchvision").ours
    with pytest.raises(InvalidRequestError, match="a picture of 300x4 pixels is too narrow for this model"):
        ours.items.process("image", png(drawn(300, 4)))


@pytest.mark.parametrize("text", ["<s>", "<s>a", "a"])
def test_a_beginning_that_a_text_spells_out_stays(text: str) -> None:
    """What the tokenizer adds to ids by itself is taken off for Florence-2, but not what a text says."""
    families = pair("florence2", "byte_level", "pil")
    families_ids = families.theirs(text=text, images=[picture(0)], return_tensors="pt")["input_ids"][0].tolist()
    infos = [info for info, _ in families.items([0])]
    assert families.render_text(text, infos).prompt_token_ids == families_ids
