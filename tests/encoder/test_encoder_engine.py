"""Embeddings equal those of the whole model, whatever is encoded beside them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from raylens.encoder.activation_memory import peak_activation_bytes
from raylens.encoder.config import EncoderConfig, LinearForm, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.encoder.loader import load_vision_half
from raylens.encoder.schema import EncodeOutput
from raylens.preprocess.schema import InvalidRequestError, ItemTensors
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

    def measured(modality: str, items: list[ItemTensors]) -> Any:
        encoded: list[Any] = []
        peaks.append(peak_activation_bytes(lambda: encoded.extend(encode(modality, items)), torch.device("cpu")))
        return encoded

    encode("image", [item])
    alone = peak_activation_bytes(lambda: encode("image", [item]), torch.device("cpu"))
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
    with pytest.raises(InvalidRequestError, match=f"has {NUM_PATCHES} patches that must .* the 0 that") as caught:
        engine.add_request("a", "image", item)
    assert (caught.value.field, caught.value.code) == ("media", "item_too_large")
    assert not engine.has_unfinished()


def tiles(count: int, seed: int = 0) -> torch.Tensor:
    """Returns a picture of several tiles. To this model's family, it may be divided."""
    return torch.randn(count, 3, 96, 96, generator=torch.Generator().manual_seed(seed))


def test_the_memory_limits_segments_not_items(shapes: str) -> None:
    engine = EncoderEngine(EncoderConfig(shapes))
    item = {"pixel_values": pixels(0)}
    alone = peak_activation_bytes(lambda: engine._encode("image", [item]), torch.device("cpu"))
    engine.bound_activations("image", item, int(2.5 * alone))
    limit = engine.max_segment_patches["image"]
    assert 2 * NUM_PATCHES <= limit < 3 * NUM_PATCHES
    assert engine.largest_segment("image", {"pixel_values": tiles(7)}) == 2 * NUM_PATCHES
    peaks: list[int] = []
    engine.add_request("many tiles", "image", {"pixel_values": tiles(7)})
    while engine.has_unfinished():
        peaks.append(peak_activation_bytes(engine.step, torch.device("cpu")))
    assert len(peaks) == 4
    # The step adds the copies of the embeddings, and puts them together.
    assert max(peaks) < 3 * alone
    large = {"pixel_values": torch.randn(3, 384, 384)}
    with pytest.raises(InvalidRequestError, match=f"the image has {16 * NUM_PATCHES} patches"):
        engine.add_request("one tile", "image", large)


@torch.inference_mode()
def test_an_item_in_segments_equals_the_whole_models(engine: EncoderEngine, whole_model: Any) -> None:
    engine.add_request("large", "image", {"pixel_values": tiles(10)})
    engine.step()
    engine.add_request("small", "image", {"pixel_values": pixels(1)})
    outputs = run(engine)
    assert list(outputs) == ["small", "large"], "the small one went between the segments"
    expected = whole_model.get_image_features(pixel_values=tiles(10)).pooler_output
    found = outputs["large"].embeddings
    assert torch.equal(found, torch.cat(tuple(expected)))
    assert found.untyped_storage().nbytes() == found.nbytes


def test_the_times_of_an_item_in_segments_add_up(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, seconds = engine._encode, []

    def measured(modality: str, items: list[ItemTensors]) -> Any:
        started = time.perf_counter()
        encoded = encode(modality, items)
        time.sleep(0.01)
        seconds.append(time.perf_counter() - started)
        return encoded

    monkeypatch.setattr(engine, "_encode", measured)
    started = time.perf_counter()
    engine.add_request("large", "image", {"pixel_values": tiles(10)})
    outputs: list[EncodeOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
        time.sleep(0.1)  # in which none is being encoded
    (output,) = outputs
    assert len(seconds) == 3
    assert sum(seconds) <= output.encode_seconds < sum(seconds) + 0.05
    assert 0.2 <= output.queue_seconds <= time.perf_counter() - started - sum(seconds) - 0.1
    assert output.batch_size == 1


def test_an_error_in_a_segment_ends_its_item_only(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, num_encoded = engine._encode, []

    def choking(modality: str, items: list[ItemTensors]) -> Any:
        num_encoded.append(len(items))
        if any(item["pixel_values"].isnan().any() for item in items):
            raise RuntimeError("the model chokes on this segment")
        return encode(modality, items)

    monkeypatch.setattr(engine, "_encode", choking)
    bad = tiles(16)
    bad[5] = torch.nan  # in the second segment of four
    engine.add_request("bad", "image", {"pixel_values": bad})
    engine.add_request("good", "image", {"pixel_values": tiles(8, seed=1)})
    outputs = run(engine)
    assert num_encoded == [1] * 4, "two of the bad item, two of the good one"
    assert outputs["bad"].embeddings is None
    assert "chokes" in str(outputs["bad"].error)
    assert outputs["good"].embeddings.shape == (8 * 36, 192)


def test_an_item_that_is_aborted_between_its_segments_ends(engine: EncoderEngine) -> None:
    engine.add_request("a", "image", {"pixel_values": tiles(16)})
    assert engine.step() == []
    engine.add_request("b", "image", {"pixel_values": pixels(0)})
    engine.abort("a")
    assert list(run(engine)) == ["b"]


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
