"""Items that clients processed themselves: the same prompt and tensors as from pixels, or a refusal that says why."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from raylens.modeling.families import known_to, load_family
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.precomputed import EMBEDDINGS, read_precomputed
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import InvalidRequestError, ItemTensors, TextPrompt
from tests.pictures import encoded
from tests.preprocess.parity import Pair, pair, picture
from tests.preprocess.small_processors import save_processor


def content(size: tuple[int, int], tensors: ItemTensors) -> bytes:
    return save({"size": torch.tensor(size), **{name: value.contiguous() for name, value in tensors.items()}})


@pytest.fixture(scope="module", params=known_to("preprocess"))
def families(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param, "byte_level", load_family("preprocess", request.param).backends[0])


def test_the_models_own_tensors_are_taken_as_they_are(families: Pair) -> None:
    image = picture(3)
    ((info, tensors),) = families.items([3])
    accepted, kept = families.ours.items.accept("image", content((image.height, image.width), tensors))
    assert accepted.expansion.token_ids.tolist() == info.expansion.token_ids.tolist()
    assert not accepted.is_encoded
    assert kept.keys() == tensors.keys()
    for name, value in kept.items():
        assert torch.equal(value, tensors[name]), name


def test_embeddings_take_the_places_of_the_pixels(families: Pair) -> None:
    image = picture(1)
    ((info, _),) = families.items([1])
    rows = torch.randn(info.num_embeds, 32)
    accepted, kept = families.ours.items.accept("image", content((image.height, image.width), {EMBEDDINGS: rows}))
    assert accepted.is_encoded
    assert torch.equal(kept[EMBEDDINGS], rows)
    assert set(families.family.modalities["image"].language_fields) == kept.keys() - {EMBEDDINGS}
    text = families.prompt(["Look: ", " what?"])
    render = families.ours.prompts.render
    prompt, expected = render(TextPrompt(text), [accepted], ["h"]), render(TextPrompt(text), [info], ["h"])
    assert prompt == expected
    (inputs,), (expected_inputs,) = prompt.language_inputs, expected.language_inputs
    assert {name: value.tolist() for name, value in inputs.items()} == {
        name: value.tolist() for name, value in expected_inputs.items()
    }
    with pytest.raises(InvalidRequestError, match=f"{info.num_embeds - 1} embeddings for .*takes {info.num_embeds}"):
        families.ours.items.accept("image", content((image.height, image.width), {EMBEDDINGS: rows[1:]}))


def malformed(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of other shapes, other kinds, and with numbers that cannot be."""
    yield torch.zeros(())
    yield torch.zeros(16)
    yield torch.zeros(16, 100)
    yield torch.zeros(2, dtype=torch.complex64)
    yield tensor[None]
    if tensor.ndim:
        yield tensor[:0]
        yield tensor[..., :-1] if tensor.shape[-1] > 1 else tensor.flatten()
    if tensor.is_floating_point():
        yield tensor.to(torch.int32)
        yield tensor.bool()
        yield tensor.index_fill(-1, torch.tensor(0), float("nan"))
        yield tensor.index_fill(-1, torch.tensor(0), float("inf"))
    else:
        yield tensor.float()
        yield ~tensor  # negative, or the other truth
    if tensor.dtype == torch.int64:
        yield torch.full_like(tensor, 2**62)


def is_finite(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isfinite(tensor).all())


@pytest.mark.long
def test_malformed_tensors_are_refused_by_name(families: Pair) -> None:
    """Those of the model's own inputs, in the form in which we keep them and in the processor's, and embeddings."""
    image = picture(1)
    ((info, packed),) = families.items([1])
    whole = families.family.modalities["image"].unpack(families.theirs, packed)
    embeddings = {EMBEDDINGS: torch.ones(info.num_embeds, 32)}
    num_refused = 0
    for form in (packed, whole, embeddings):
        for name, tensor in form.items():
            for wrong in malformed(tensor):
                if name == EMBEDDINGS and wrong.shape[:1] == tensor.shape[:1] and wrong.ndim == 2 and is_finite(wrong):
                    continue  # of another width, which the language model refuses
                tensors = {**form, name: wrong}
                with pytest.raises(InvalidRequestError) as caught:
                    families.ours.items.accept("image", content((image.height, image.width), tensors))
                assert caught.value.field == "media"
                assert name in caught.value.reason
                num_refused += 1
    assert num_refused >= 20


def test_a_refusal_says_which_shape_is_wanted_and_which_was_given() -> None:
    families = pair("qwen2_vl", "byte_level", "pil")
    image = picture(1)
    ((_, packed),) = families.items([1])
    whole = families.family.modalities["image"].unpack(families.theirs, packed)
    wrong = {**packed, "pixel_values": torch.zeros(16, 100)}
    with pytest.raises(InvalidRequestError) as caught:
        families.ours.items.accept("image", content((image.height, image.width), wrong))
    wanted = list(whole["pixel_values"].shape)
    assert caught.value.reason == f"pixel_values is float32 [16, 100], for a picture of this size float32 {wanted}"


def test_embeddings_keep_the_dtype_in_which_the_encoder_hands_them_over(tmp_path: Path) -> None:
    folder = save_processor("llava", "byte_level", tmp_path)
    config = ProcessorConfig(folder, dtype=torch.float16, embedding_dtype=torch.float32)
    items = MultiModalProcessor(config).items
    info, tensors = items.process("image", encoded(picture(0)))
    assert tensors["pixel_values"].dtype == torch.float16
    rows = torch.full((info.num_embeds, 32), 1e6)
    _, kept = items.accept("image", content((64, 64), {EMBEDDINGS: rows}))
    assert torch.equal(kept[EMBEDDINGS], rows)


def without(name: str) -> Callable[[ItemTensors], ItemTensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[ItemTensors], ItemTensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("image_grid_thw"), "the file has 1 tensors beside 'size', expected are"),
        (lambda tensors: {**tensors, "more": torch.zeros(1)}, "the file has 3 tensors"),
        (changed("pixel_values", lambda value: value[1:]), "pixel_values is float32 \\[\\d+, \\d+\\], for a picture"),
        (changed("pixel_values", lambda value: value / 0), "not finite"),
        (changed("image_grid_thw", lambda value: value.flip(0)), "image_grid_thw holds other numbers"),
        (changed("image_grid_thw", lambda value: value.float()), "image_grid_thw is float32"),
        (lambda tensors: {EMBEDDINGS: torch.zeros(3)}, "of two axes, not float32 \\[3\\]"),
        (lambda tensors: {EMBEDDINGS: torch.zeros(3, 3, dtype=torch.int32)}, "of two axes, not int32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Callable[[ItemTensors], ItemTensors], reason: str) -> None:
    families = pair("qwen2_vl", "byte_level", "pil")
    image = picture(1)
    ((_, tensors),) = families.items([1])
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        families.ours.items.accept("image", content((image.height, image.width), change(tensors)))
    assert caught.value.code == "invalid_tensors"


@pytest.mark.parametrize(
    ("size", "code"),
    [
        (torch.tensor([1, 2, 3]), "invalid_tensors"),
        (torch.tensor([20.0, 20.0]), "invalid_tensors"),
        (torch.tensor([-5, 20]), "image_too_small"),
        (torch.tensor([10**9, 10**9]), "image_too_large"),
        (torch.tensor([5000, 5]), "image_too_large"),
    ],
)
def test_sizes_are_held_to_the_limits_of_pictures(size: torch.Tensor, code: str) -> None:
    items = pair("llava", "byte_level", "pil").ours.items
    with pytest.raises(InvalidRequestError) as caught:
        items.accept("image", save({"size": size, EMBEDDINGS: torch.zeros(4, 4)}))
    assert caught.value.code == code


@pytest.mark.parametrize("damaged", [b"", b"no tensors", encoded(picture(0)), save({"a": torch.zeros(4)})[:-4]])
def test_other_files_are_refused(damaged: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        pair("llava", "byte_level", "pil").ours.items.accept("image", damaged)


@pytest.mark.parametrize(
    "header",
    [
        {str(number): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(2000)},
        {"__metadata__": {str(number): "" for number in range(20_000)}},
        {"size": {"dtype": "U8", "shape": [1] * 100_000, "data_offsets": [0, 1]}},
    ],
    ids=["tensors", "metadata", "axes"],
)
def test_headers_out_of_proportion_are_refused(header: dict[str, Any]) -> None:
    packed = json.dumps(header).encode()
    damaged = struct.pack("<Q", len(packed)) + packed + b"x"
    with pytest.raises(InvalidRequestError, match=f"has {len(packed)} bytes, the limit is 65536") as caught:
        read_precomputed(damaged, {}, limits=MediaLimits())
    assert caught.value.code == "invalid_tensors"


def test_floating_point_tensors_are_kept_in_the_encoders_dtype(shapes: str) -> None:
    items = MultiModalProcessor(ProcessorConfig(shapes, dtype=torch.bfloat16)).items
    info, tensors = items.accept("image", content((96, 96), {EMBEDDINGS: torch.zeros(36, 8)}))
    assert tensors[EMBEDDINGS].dtype == torch.bfloat16
    assert info.num_bytes == 36 * 8 * 2
