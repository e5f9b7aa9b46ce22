"""Embeddings equal those of the whole model, whatever is encoded beside them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from encoder.activation_memory import peak_activation_bytes
from encoder.config import EncoderConfig, LinearForm, PartConfig
from encoder.engine import EncoderEngine
from encoder.loader import load_vision_half
from preprocess.schema import InvalidRequestError, ItemTensors
from tests.checkpoint_copies import copy_checkpoint

NUM_PATCHES = 36  # 96 pixels a side, in squares of 16


@pytest.fixture(scope="module")
def engine(shapes: str) -> EncoderEngine:
    return EncoderEngine(EncoderConfig(shapes, max_batch_patches=4 * NUM_PATCHES))


@pytest.fixture(scope="module")
def whole_model(shapes: str) -> Any:
    return LlavaForConditionalGeneration.from_pretrained(shapes, dtype=torch.float32).eval()


def pixels(seed: int) -> torch.Tensor:
    return torch.randn(3, 96, 96, generator=torch.Generator().manual_seed(seed))


def run(engine: EncoderEngine) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.mark.parametrize("batch_sizes", [[1], [4, 4, 4, 4], [4, 4, 4, 4, 2, 2]])
def test_embeddings_equal_the_whole_models(engine: EncoderEngine, whole_model: Any, batch_sizes: list[int]) -> None:
    num_items = len(batch_sizes)
    for i in range(num_items):
        engine.add_request(str(i), "image", {"pixel_values": pixels(i)})
    outputs = run(engine)
    assert len(outputs) == num_items
    for i in range(num_items):
        with torch.inference_mode():
            (expected,) = whole_model.get_image_features(pixel_values=pixels(i)[None]).pooler_output
        assert torch.equal(outputs[str(i)].embeddings, expected)
    assert [output.batch_size for output in outputs.values()] == batch_sizes


def test_an_item_owns_its_memory(engine: EncoderEngine) -> None:
    for i in range(2):
        engine.add_request(str(i), "image", {"pixel_values": pixels(i)})
    for output in run(engine).values():
        assert output.embeddings.untyped_storage().nbytes() == output.embeddings.nbytes


def test_a_bad_item_fails_alone(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(model: Any, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        if any(item["pixel_values"].isnan().any() for item in items):
            raise RuntimeError("the model chokes on this item")
        return modality.encode(model, items)

    modality = engine._family.modalities["image"]
    modalities = {"image": replace(modality, encode=encode)}
    monkeypatch.setattr(engine, "_family", replace(engine._family, modalities=modalities))
    engine.add_request("bad", "image", {"pixel_values": pixels(0) * torch.nan})
    engine.add_request("good", "image", {"pixel_values": pixels(0)})
    outputs = run(engine)
    assert outputs["bad"].embeddings is None
    assert outputs["bad"].error is not None
    assert outputs["good"].error is None
    assert outputs["good"].embeddings.shape == (36, 192)


@pytest.mark.parametrize("linear", ["plain", "packed", "int8"])
def test_batches_keep_within_the_memory_there_is(
    shapes: str, monkeypatch: pytest.MonkeyPatch, linear: LinearForm
) -> None:
    part = PartConfig(linear=linear)
    engine = EncoderEngine(EncoderConfig(shapes, tower=part, projector=part))
    item = {"pixel_values": pixels(0)}
    peaks: list[int] = []
    encode = engine._encode

    def measured(batch: Any) -> Any:
        encoded: list[Any] = []
        peaks.append(peak_activation_bytes(lambda: encoded.extend(encode(batch)), torch.device("cpu")))
        return encoded

    engine._encode([engine._request("", "image", item)])
    alone = peak_activation_bytes(lambda: encode([engine._request("", "image", item)]), torch.device("cpu"))
    max_bytes = int(3.5 * alone)
    engine.bound_activations("image", item, max_bytes)
    monkeypatch.setattr(engine, "_encode", measured)
    for i in range(7):
        engine.add_request(str(i), "image", item)
    assert [output.batch_size for output in run(engine).values()] == [3, 3, 3, 3, 3, 3, 1]
    assert max(peaks) <= max_bytes
    if linear != "int8":  # whose weights are spread out for each call, however many items are in it
        assert max(peaks) > 2.5 * alone, "or the bound is not near"


def test_an_item_that_there_is_no_memory_for_is_refused(shapes: str) -> None:
    engine = EncoderEngine(EncoderConfig(shapes))
    item = {"pixel_values": pixels(0)}
    engine.bound_activations("image", item, 1000)
    with pytest.raises(InvalidRequestError, match=f"has {NUM_PATCHES} patches, more than the 0 that") as caught:
        engine.add_request("a", "image", item)
    assert (caught.value.field, caught.value.code) == ("media", "item_too_large")
    assert not engine.has_unfinished()


def test_a_kind_of_item_that_the_model_does_not_take_is_refused(shapes: str) -> None:
    with pytest.raises(InvalidRequestError, match="this model's encoder takes image, not video"):
        EncoderEngine(EncoderConfig(shapes)).add_request("a", "video", {})


def test_an_aborted_item_is_not_encoded(engine: EncoderEngine) -> None:
    for name in ("a", "b"):
        engine.add_request(name, "image", {"pixel_values": pixels(0)})
    engine.abort("a")
    engine.abort("unknown")
    assert list(run(engine)) == ["b"]


def test_only_the_vision_half_is_loaded(shapes: str, whole_model: Any) -> None:
    half, _ = load_vision_half(EncoderConfig(shapes))
    vision = {name for name, _ in half.named_parameters()}
    language = {name for name, _ in whole_model.named_parameters()} - vision
    assert all("language_model" in name or "lm_head" in name for name in language)
    assert vision.isdisjoint(language)
    assert not any("language_model" in name for name in vision)


def test_both_spellings_of_the_weights_names_load(shapes: str, tmp_path: Path) -> None:
    """Published checkpoints name the tower's weights `vision_tower.vision_model.`, newly saved ones do not."""
    copy = copy_checkpoint(shapes, tmp_path, lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    half, _ = load_vision_half(EncoderConfig(copy))
    expected, _ = load_vision_half(EncoderConfig(shapes))
    for (name, value), (_, other) in zip(half.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(value, other), name


def test_a_checkpoint_without_a_weight_is_refused(shapes: str, tmp_path: Path) -> None:
    copy = copy_checkpoint(shapes, tmp_path, lambda name: None if "multi_modal_projector.linear_2" in name else name)
    with pytest.raises(ValueError, match=r"lacks weights of the vision half.*linear_2"):
        EncoderEngine(EncoderConfig(copy))
